"""Runs before any test module is imported, so before any Triton kernel is decorated.

Without a GPU the kernels run in Triton's interpreter, which has to be chosen through the environment
before ``triton.jit`` sees them. ``tests.fixtures.triton_interpreter`` repairs it; tests of kernels
import their device and marks from there.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _same_draws_every_run() -> None:
    """Tests draw the same numbers alone, together and in any order: a bound holds or it does not."""
    torch.manual_seed(0)
