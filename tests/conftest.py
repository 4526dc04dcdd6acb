"""Runs before any test module is imported, so before any Triton kernel is decorated.

Without a GPU the kernels run in Triton's interpreter, which has to be chosen through the environment
before ``triton.jit`` sees them. ``tests.fixtures.triton_interpreter`` repairs it; tests of kernels
import their device and marks from there.
"""

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts its background jobs with ctrl-C ignored, which programs started here would inherit. A
# command respects that (``nohup``), and tests of ctrl-C are about commands in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_draws_every_run() -> None:
    """Tests draw the same numbers alone, together and in any order: a bound holds or it does not."""
    torch.manual_seed(0)
