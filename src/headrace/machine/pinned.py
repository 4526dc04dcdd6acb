"""Memory that a GPU may read at full speed: how much of it to ask for, and asking.

Pinned pages cannot move or be swapped; systems cap them, some (WSL, WDDM) far below the RAM that is
there. So memory is pinned piece by piece, and the first refusal ends it: the rest stays pageable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from headrace.core.errors import MachineError
from headrace.core.words import counted
from headrace.machine.probe import MemoryInfo

log = logging.getLogger(__name__)

# Of the memory that this process may use, what is pinned unless the user says otherwise. The rest is
# what other programs, the page cache and our own pageable memory live on.
PIN_FRACTION = 0.75
# Windows lets GPUs address at most half of the RAM ("shared GPU memory": Microsoft, "GPUs in the
# task manager", 2017); its pinned memory counts there, and WSL's kernel is one of its guests.
WSL_PIN_FRACTION = 0.5

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable, cudaHostRegisterMapped


@dataclass(frozen=True)
class PinBudget:
    """How much may be pinned, and why so much."""

    nbytes: int
    reason: str


def pin_budget(memory: MemoryInfo, *, wsl: bool, requested: int | None = None) -> PinBudget:
    """Decide how much memory to pin at most.

    Args:
        memory: of this machine, container limits included.
        wsl: whether Linux runs as Windows' subsystem.
        requested: what the user asked for; taken as it is, and the system may refuse it.
    """
    if requested is not None:
        return PinBudget(requested, "as asked for")
    fraction = WSL_PIN_FRACTION if wsl else PIN_FRACTION
    total = memory.usable_total_nbytes
    where = " under WSL, where Windows caps pinned memory" if wsl else ""
    return PinBudget(
        int(total * fraction), f"{fraction:.0%} of {total / 1e9:.1f} GB of usable RAM{where}"
    )


class Pinner(Protocol):
    """Pins ranges of memory for GPUs."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin a range; None if that worked, else why not."""
        ...

    def unpin(self, address: int) -> None:
        """Undo ``pin`` of the range that starts here."""
        ...


class NoPinner:
    """Refuses everything, for a reason that is known beforehand."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def pin(self, address: int, nbytes: int) -> str | None:
        return self._reason

    def unpin(self, address: int) -> None:
        return None


class CudaPinner:
    """Registers memory with the CUDA driver: every GPU of the process reads it at its own address."""

    def pin(self, address: int, nbytes: int) -> str | None:
        try:
            code = _cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
        except RuntimeError as error:
            return str(error)
        if int(code) == 0:
            return None
        reason = f"cudaHostRegister: {_cudart().cudaGetErrorString(code)}"
        _absorb_last_error()
        return reason

    def unpin(self, address: int) -> None:
        code = int(_cudart().cudaHostUnregister(address))
        if code:
            log.warning("memory at %#x could not be unpinned: CUDA error %d", address, code)
            _absorb_last_error()


def default_pinner() -> Pinner:
    """The pinner of this machine."""
    if not torch.cuda.is_available():
        return NoPinner("there is no CUDA device")
    return CudaPinner()


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart())


def _absorb_last_error() -> None:
    """CUDA keeps the code of a failed call for the next launch to report: let that be this one."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def verify_copies(
    samples: Iterable[torch.Tensor], there_and_back: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    """Copy samples to the GPU and back and compare them: some drivers report success and copy nothing.

    Args:
        samples: uint8 tensors in the memory that will be copied from.
        there_and_back: copies a tensor to the device, and from there into new host memory.

    Returns how many bytes were compared.

    Raises:
        MachineError: a sample came back changed.
    """
    compared = 0
    for number, sample in enumerate(samples):
        back = there_and_back(sample)
        if not torch.equal(back.cpu(), sample):
            wrong = int((back.cpu() != sample).sum())
            raise MachineError(
                f"copies to the GPU are not reliable: of sample {number}, {wrong} of "
                f"{counted(sample.numel(), 'byte')} came back changed",
                hint="update the GPU driver (under WSL: the Windows driver), or run with --device cpu",
            )
        compared += sample.numel()
    return compared


def cuda_round_trip(sample: torch.Tensor) -> torch.Tensor:
    """``there_and_back`` of ``verify_copies`` for the current CUDA device."""
    return sample.to("cuda", non_blocking=True).to("cpu")
