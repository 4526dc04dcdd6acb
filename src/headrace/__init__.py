"""Headrace: Mixture-of-Experts language models on one ordinary machine, and what limits them."""

__version__ = "0.1.0"
