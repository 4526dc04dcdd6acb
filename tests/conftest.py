"""Runs before any test module is imported, so before any Triton kernel is decorated.

Without a GPU the kernels run in Triton's interpreter, which has to be chosen through the environment
before ``triton.jit`` sees them. ``tests.fixtures.triton_interpreter`` repairs it; tests of kernels
import their device and marks from there.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
