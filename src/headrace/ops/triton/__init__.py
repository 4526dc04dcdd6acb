"""Triton kernels and cuBLAS products for CUDA GPUs."""
