"""CUDA C++ compiled at run time by NVRTC, which torch's CUDA builds bring along.

For the few kernels whose instruction stream Triton cannot make short enough (docs/adr); each has a twin
in Triton that serves where NVRTC is missing.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import InternalError

_DYNAMIC_SHARED_NBYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def _nvrtc() -> Any:
    """The library, or None where there is none."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    packages = Path(sysconfig.get_paths()["platlib"]) / "nvidia"
    found = [str(p) for p in sorted(packages.glob(f"*/lib/libnvrtc.so.{major}*"))]
    toolkit = f"/usr/local/cuda/lib64/libnvrtc.so.{major}"
    for name in (f"libnvrtc.so.{major}", *found, toolkit):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def available() -> bool:
    """Whether kernels can be compiled here."""
    return _nvrtc() is not None


def compiled(source: str, capability: tuple[int, int], defines: Sequence[str]) -> bytes:
    """The binary of a program for an architecture; ``defines``: "NAME=VALUE".

    Raises:
        InternalError: NVRTC is missing, or refuses the program (its log is the message).
    """
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise InternalError("NVRTC is not there: ask available() first")
    suffix = "a" if capability >= (9, 0) else ""
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}{suffix}", "--std=c++17"]
    options += [f"-D{one}" for one in defines]
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"headrace.cu", 0, None, None
    )
    if created:
        raise InternalError(f"NVRTC does not take a program: error {created}")
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        if status:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise InternalError(f"NVRTC refuses a kernel: {log.value.decode()[:2000]}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which, and a union of 64 bytes of which an integer is used."""

    _fields_ = (
        ("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"dim{i}", ctypes.c_uint) for i in range(6)), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A kernel of a loaded program, on the device that was current when it was loaded."""

    def __init__(self, function: ctypes.c_void_p, shared_nbytes: int) -> None:
        self._function = function
        self._shared = shared_nbytes
        if shared_nbytes > 48 << 10:  # more must be asked for
            _check(
                _driver().cuFuncSetAttribute(function, _DYNAMIC_SHARED_NBYTES, shared_nbytes),
                "shared memory for a kernel",
            )

    def launch(
        self, grid: tuple[int, int, int], threads: int, *args: Any, overlaps: bool = False
    ) -> None:
        """Queue it on the current stream; ``args``: ctypes values in the kernel's order.

        overlaps: it may start before the kernel ahead of it has ended, and waits for that itself
        """
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        stream = torch.cuda.current_stream().cuda_stream
        attribute = _Attribute(_SERIALIZATION, 0, 1)
        config = _Config(
            *grid, threads, 1, 1, self._shared, stream, ctypes.pointer(attribute), int(overlaps)
        )
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(status, "a launch")


def load(binary: bytes, shared_nbytes: dict[str, int]) -> dict[str, Kernel]:
    """Kernels of a program by name; ``shared_nbytes``: dynamic shared memory of each."""
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), binary), "loading a program")
    kernels: dict[str, Kernel] = {}
    for name, nbytes in shared_nbytes.items():
        function = ctypes.c_void_p()
        found = _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _check(found, f"finding kernel {name}")
        kernels[name] = Kernel(function, nbytes)
    return kernels


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise InternalError(f"CUDA error {status} at {what}: {reason}")
