"""Safetensors: headers, shards and indexes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.checkpoint.safetensors import read_directory, read_file
from headrace.core.errors import CheckpointError


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """A file by its specification: length, header, data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if not isinstance(header, bytes):
        text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def floats(path: Path, **tensors: list[float]) -> Path:
    save_file({k: np.array(v, np.float32) for k, v in tensors.items()}, path)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_file(path)
    for word in (str(path), "hint: ", *words):
        assert word in str(caught.value)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.integers(0, 256, (2, 2, 2), dtype=np.uint8),
        "c": np.array(7.0, np.float32),
        "d": rng.normal(size=(4,)).astype(np.float16),
        "e": np.arange(6, dtype=np.int64),
    }
    save_file(stored, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_file(tmp_path / "x.safetensors")
    assert set(found) == set(stored)
    for name, values in stored.items():
        tensor = found[name]
        assert tensor.shape == values.shape
        assert tensor.data.tobytes() == values.tobytes()
    assert found["d"].data.dtype == np.uint16  # two-byte floats are bits
    assert (found["b"].dtype, found["d"].dtype, found["e"].dtype) == ("U8", "F16", "I64")


def test_data_is_a_private_writable_view(tmp_path: Path) -> None:
    path = floats(tmp_path / "x.safetensors", a=[1, 2], b=[3])
    before = path.read_bytes()
    found = read_file(path)
    bases = set()
    for tensor in found.values():
        base: Any = tensor.data
        while isinstance(base, np.ndarray):
            base = base.base
        bases.add(id(base))
    assert len(bases) == 1
    found["a"].data[0] = 99
    assert read_file(path)["a"].data[0] == 1
    assert path.read_bytes() == before


def test_elements_off_their_alignment_are_copied(tmp_path: Path) -> None:
    # A header of odd length, which the format allows: the floats lie at odd addresses.
    header = json.dumps({"a": entry("F32", [2], 0, 8)}).encode()
    header += b" " * ((len(header) + 1) % 2)
    assert (8 + len(header)) % 4
    data = np.array([1.5, -2], np.float32)
    tensor = read_file(write(tmp_path / "x.safetensors", header, data.tobytes()))["a"]
    assert tensor.data.flags.aligned
    np.testing.assert_array_equal(tensor.data, data)


def test_b002_a_truncated_file_names_itself_and_the_bytes_missing(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"w": np.zeros((16, 16), np.float32), "v": np.zeros(4, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-64])
    refused(path, "truncated", "64 bytes are missing")
    path.write_bytes(path.read_bytes()[:40])
    refused(path, "truncated", "of them are missing")
    path.write_bytes(b"\x01\x02\x03")
    refused(path, "5 bytes are missing")


def test_b003_the_index_decides_whatever_the_order(tmp_path: Path) -> None:
    # Both shards hold w; a is first in name order, b is where the index says that w is.
    floats(tmp_path / "a.safetensors", w=[1], x=[2])
    floats(tmp_path / "b.safetensors", w=[10], y=[3])
    for weight_map, expected in (
        ({"x": "a.safetensors", "w": "b.safetensors", "y": "b.safetensors"}, 10),
        ({"y": "b.safetensors", "w": "a.safetensors", "x": "a.safetensors"}, 1),
    ):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        found = read_directory(tmp_path)
        assert found.tensors["w"].data[0] == expected
        assert set(found.tensors) == {"w", "x", "y"}
        (note,) = found.notes
        assert "'w' is not used" in note
        assert weight_map["w"] in note


def test_b003_tensors_outside_the_index_are_reported(tmp_path: Path) -> None:
    floats(tmp_path / "a.safetensors", w=[1], stale=[2])
    floats(tmp_path / "consolidated.safetensors", w=[5])  # in no index: not opened
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    found = read_directory(tmp_path)
    assert set(found.tensors) == {"w"}
    assert found.tensors["w"].data[0] == 1
    assert found.notes == (
        "a.safetensors: tensor 'stale' is not in model.safetensors.index.json: not used",
    )
    assert found.nbytes == (tmp_path / "a.safetensors").stat().st_size


def test_missing_shards_and_tensors_are_named(tmp_path: Path) -> None:
    floats(tmp_path / "a.safetensors", w=[1])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing: .* 1 tensor.*'v'"):
        read_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors has no tensor 'v'"):
        read_directory(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "", "..", "x\\y", 7, None])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path, file: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="expected a plain file name"):
        read_directory(tmp_path)


def test_indexes_that_are_none_or_too_many(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_directory(tmp_path)
    (tmp_path / "y.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="2 indexes"):
        read_directory(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        read_directory(tmp_path)
    floats(tmp_path / "a.safetensors", w=[1])
    floats(tmp_path / "b.safetensors", v=[2])
    assert set(read_directory(tmp_path).tensors) == {"w", "v"}
    floats(tmp_path / "b.safetensors", w=[2])
    with pytest.raises(CheckpointError, match=r"'w' is in .*a\.safetensors and in .*b\.saf"):
        read_directory(tmp_path)


def test_b005_tensors_without_elements_load(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.safetensors",
        {
            "empty": entry("F32", [0], 0, 0),
            "w": entry("F32", [1], 0, 4),
            "matrix": entry("BF16", [0, 64], 4, 4),
        },
        b"\0\0\0\0",
    )
    found = read_file(path)
    assert found["empty"].data.shape == (0,)
    assert found["matrix"].data.shape == (0, 64)
    assert found["w"].data.tolist() == [0.0]
    assert read_file(write(path, {"only": entry("F32", [0], 0, 0)}))["only"].data.size == 0


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": entry("F32", [2], 0, 4)}, ("'w'", "4 bytes", "expected 8")),
        ({"w": entry("F32", [1], 4, 0)}, ("'w'",)),
        ({"w": entry("F32", [-1], 0, 4)}, ("'w'", "shape")),
        ({"w": entry("F32", [1.0], 0, 4)}, ("'w'", "shape")),
        ({"w": entry("F32", [True], 0, 4)}, ("'w'", "shape")),
        ({"w": entry("F32", [1] * 9, 0, 4)}, ("'w'", "at most 8")),
        ({"w": entry("F32", [2**62, 2**62], 0, 4)}, ("'w'", "2^63")),
        ({"w": entry("F32", [0, 2**62], 0, 0)}, ("'w'", "2^63")),
        ({"w": entry("F4", [1], 0, 4)}, ("'w'", "dtype", "F4", "BF16")),
        ({"w": entry("F32", [1], 0, 2**64)}, ("'w'", "data_offsets")),
        ({"w": entry("F32", [1], 0, None)}, ("'w'", "data_offsets")),
        ({"w": {"dtype": "F32", "shape": [1]}}, ("'w'", "data_offsets")),
        ({"w": [1]}, ("'w'", "an object")),
        ({"w": entry("U8", [4], 0, 4), "v": entry("U8", [2], 2, 4)}, ("overlap", "'v'", "'w'")),
        ({"w": entry("U8", [2], 2, 4)}, ("2 bytes before tensor 'w'",)),
        ({"w": entry("U8", [2], 0, 2)}, ("4 bytes", "end at byte 2")),
        (b"[]", ("JSON object",)),
        (b"{", ("not valid JSON",)),
        (b"\xff\xfe", ("not valid JSON",)),
        (b"[" * 50_000, ("not valid JSON",)),
        (b'{"w":' + b"9" * 5000 + b"}", ("not valid JSON",)),
        (b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{}}', ("'w'", "twice")),
    ],
)
def test_impossible_headers(
    tmp_path: Path, header: dict[str, Any] | bytes, words: tuple[str, ...]
) -> None:
    refused(write(tmp_path / "x.safetensors", header, bytes(4)), *words)


def test_b014_the_header_length_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tracemalloc.start()
    for length, word in ((2**64 - 1, "at most 100000000"), (10**8, "missing")):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        refused(path, word)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "x.safetensors", "No such file")
    (tmp_path / "y.safetensors").mkdir()
    refused(tmp_path / "y.safetensors", "directory")
