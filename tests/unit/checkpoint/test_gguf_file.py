"""GGUF headers: what they claim is checked before it is believed."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.checkpoint.gguf import read_file, read_gguf
from headrace.checkpoint.open import open_checkpoint
from headrace.core.errors import CheckpointError, UnsupportedModelError
from tests.fixtures import gguf_bytes as gb
from tests.fixtures.gguf_bytes import Gguf, Tensor, tiny_llama


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Gguf | bytes], Path]:
    def write_file(content: Gguf | bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
        return path

    return write_file


def test_agrees_with_the_gguf_package(write: Callable[[Gguf], Path]) -> None:
    path = write(tiny_llama(layers=2))
    ours, theirs = read_file(path), gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(n) for n in reversed(tensor.shape))
        (part,) = found.parts.values()
        assert part.tobytes() == tensor.data.tobytes()
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key


def test_values_of_every_type_and_nested_arrays(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.raw_metadata = b""
    for kind, dtype, number in (
        (0, "<u1", 200), (1, "<i1", -7), (2, "<u2", 60000), (3, "<i2", -300),
        (4, "<u4", 4_000_000_000), (5, "<i4", -5), (6, "<f4", 0.5), (7, "<u1", 1),
        (10, "<u8", 2**63), (11, "<i8", -(2**40)), (12, "<f8", 0.1),
    ):  # fmt: skip
        raw = np.array([number], dtype).tobytes()
        file.raw_metadata += gb.text(f"test.{kind}") + struct.pack("<I", kind) + raw
    file.set("test.nested", gb.ARRAY, (gb.ARRAY, [(gb.U8, [1, 2]), (gb.STRING, ["x", ""])]))
    file.num_pairs = len(file.metadata) + 11
    metadata = read_file(write(file)).metadata
    assert [metadata[f"test.{k}"] for k in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)] == [
        200, -7, 60000, -300, 4_000_000_000, -5, 0.5, True, 2**63, -(2**40), 0.1,
    ]  # fmt: skip
    assert metadata["test.nested"] == [[1, 2], ["x", ""]]
    assert metadata["test.7"] is True


def _refused(path: Path, *words: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "hint: " in message
    for word in (path.name, *words):
        assert word in message


def test_b009_unknown_tensor_types_are_named(write: Callable[[Gguf], Path]) -> None:
    for type_id in (4, 250):
        file = tiny_llama()
        file.tensors[3].type_id = type_id
        _refused(
            write(file), "'blk.0.attn_v.weight'", f"type id {type_id}", "39 mxfp4_gguf", "3 q4_1",
            error=UnsupportedModelError,
        )  # fmt: skip


def test_b009_type_39_loads(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    query = file.tensors[1]
    query.type_id, query.data = 39, bytes(32 * 17)
    found = read_file(write(file)).tensors["blk.0.attn_q.weight"]
    assert (found.format, found.shape) == ("mxfp4_gguf", (32, 32))
    assert found.parts["blocks"].shape == (32, 17)


def test_b012_dimensions_that_wrap_to_zero(write: Callable[[Gguf], Path]) -> None:
    # 4 * (2^30 - 1) * (2^30 + 1) floats are 2^64 - 16 bytes: padded to 32 they are 0 in 64 bits.
    dims = (4, 2**30 - 1, 2**30 + 1)
    assert (-(-(4 * dims[0] * dims[1] * dims[2]) // 32) * 32) % 2**64 == 0
    file = Gguf(tensors=[Tensor("w", dims, 0, bytes(200))])
    raw = file.to_bytes().ljust(384, b"\0")
    path = write(raw)
    tracemalloc.start()
    _refused(path, "'w'", "more than 2^63 bytes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    # One that fits 63 bits, and not the file.
    _refused(write(Gguf(tensors=[Tensor("w", (2**40,), 0, b"")])), "'w'", str(2**42))
    # A zero hides no overflow.
    _refused(write(Gguf(tensors=[Tensor("w", (0, 2**40, 2**40), 0, b"")])), "2^63")


def test_b013_array_element_types(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.set("tokenizer.ggml.scores", gb.ARRAY, (gb.U8, [1] * 6))
    _refused(write(file), "tokenizer.ggml.scores", "UINT8", "FLOAT32")
    file = tiny_llama()
    file.set("tokenizer.ggml.tokens", gb.ARRAY, (gb.I32, [1] * 6))
    _refused(write(file), "tokenizer.ggml.tokens", "INT32", "STRING")
    file = tiny_llama()
    file.set("tokenizer.ggml.token_type", gb.U32, 1)
    _refused(write(file), "tokenizer.ggml.token_type", "UINT32", "an array")
    file = tiny_llama()
    file.set("general.architecture", gb.U32, 1)
    _refused(write(file), "general.architecture", "UINT32", "STRING")
    file = tiny_llama()
    file.set("test.flags", gb.ARRAY, (gb.U8, [0, 2]))
    raw = file.to_bytes()
    at = raw.index(b"test.flags") + 10 + 4
    _refused(write(raw[:at] + struct.pack("<I", gb.BOOL) + raw[at + 4 :]), "test.flags", "0 or 1")


_KEY = gb.text("general.name")


@pytest.mark.parametrize(
    ("raw_metadata", "words"),
    [
        # A string of 1 GiB, of 2^64 - 1 bytes; a key as long; an array of 2^60 strings, numbers.
        (_KEY + struct.pack("<IQ", gb.STRING, 1 << 30), ("general.name", str(1 << 30))),
        (_KEY + struct.pack("<IQ", gb.STRING, 2**64 - 1), ("general.name",)),
        (struct.pack("<Q", 1 << 30), ("metadata key 0", "65535")),
        (_KEY + struct.pack("<IIQ", gb.ARRAY, gb.STRING, 1 << 60), ("number of elements",)),
        (_KEY + struct.pack("<IIQ", gb.ARRAY, gb.U64, 20), ("general.name", "missing")),
        (_KEY + struct.pack("<IIQ", gb.ARRAY, 77, 1), ("unknown type 77",)),
        (_KEY + struct.pack("<I", 99), ("unknown type 99",)),
        (_KEY + struct.pack("<I", gb.ARRAY) + struct.pack("<IQ", gb.ARRAY, 1) * 3, ("nested",)),
    ],
)
def test_b014_lengths_are_bounded_by_the_file(
    write: Callable[[bytes], Path], raw_metadata: bytes, words: tuple[str, ...]
) -> None:
    file = Gguf(raw_metadata=raw_metadata, num_pairs=1)
    raw = file.to_bytes().ljust(160, b"\0")
    path = write(raw)
    tracemalloc.start()
    _refused(path, *words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_b014_dimensions_alignment_and_counts(write: Callable[[Gguf], Path]) -> None:
    raw = bytearray(Gguf(tensors=[Tensor("w", (32,), 0, bytes(128))]).to_bytes())
    at = raw.index(b"w") + 1
    raw[at : at + 4] = struct.pack("<I", 1_000_000)
    _refused(write(bytes(raw)), "'w'", "1000000 dimensions")
    for alignment in (1 << 30, 0, 48, 1 << 17):
        file = tiny_llama()
        file.set("general.alignment", gb.U32, alignment)
        _refused(write(file), "general.alignment", str(alignment), "power of two")
    file = tiny_llama()
    file.set("general.alignment", gb.U64, 32)
    _refused(write(file), "general.alignment", "UINT64", "UINT32")
    for name, what in (("num_tensors", "number of tensors"), ("num_pairs", "metadata pairs")):
        file = tiny_llama()
        setattr(file, name, 1 << 40)
        _refused(write(file), what, str(1 << 40))


def test_own_alignment_is_used(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.alignment = 256
    file.set("general.alignment", gb.U32, 256)
    embed = read_file(write(file)).tensors["token_embd.weight"]
    assert embed.parts["data"].tobytes() == file.tensors[0].data


def test_magic_version_and_byte_order(write: Callable[[bytes], Path]) -> None:
    raw = tiny_llama().to_bytes()
    _refused(write(b"<!doctype html><html>"), "not a GGUF file", "<!do")
    _refused(write(b"GG"), "truncated", "2 bytes are missing")
    _refused(write(b""), "truncated", "4 bytes are missing")
    _refused(write(raw[:4] + struct.pack("<I", 1) + raw[8:]), "version 1", "2, 3",
             error=UnsupportedModelError)  # fmt: skip
    _refused(write(raw[:4] + struct.pack(">I", 3) + raw[8:]), "big-endian",
             error=UnsupportedModelError)  # fmt: skip


def test_truncated_data_names_file_and_bytes(write: Callable[[bytes], Path]) -> None:
    raw = tiny_llama().to_bytes()
    _refused(write(raw[:-64]), "64 bytes are missing", "'output_norm.weight'")
    _refused(write(raw[:-20_000]), "missing")


def test_offsets_are_aligned_in_range_and_apart(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.tensors[2].offset = 33
    _refused(write(file), "'blk.0.attn_k.weight'", "offset 33", "alignment 32")
    file = tiny_llama()
    file.tensors[2].offset = 32
    _refused(write(file), "overlap", "'blk.0.attn_k.weight'", "'token_embd.weight'")
    file = tiny_llama()
    file.tensors[2].offset = 2**63
    _refused(write(file), "truncated", "'blk.0.attn_k.weight'")


def test_names_and_keys_must_differ(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.tensors[2].name = file.tensors[1].name
    _refused(write(file), "'blk.0.attn_q.weight'", "twice")
    file = tiny_llama()
    file.metadata.append(file.metadata[1])
    _refused(write(file), "'llama.block_count'", "twice")


def test_rows_are_whole_blocks(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.tensors[1].dims = (16, 64)
    _refused(write(file), "'blk.0.attn_q.weight'", "rows of 16", "multiple of 32")


def test_text_that_is_not_utf8(write: Callable[[Gguf], Path]) -> None:
    file = tiny_llama()
    file.set("tokenizer.ggml.tokens", gb.ARRAY, (gb.STRING, [b"a", b"\xff"]))
    _refused(write(file), "element 1 of tokenizer.ggml.tokens", "UTF-8")
    file = tiny_llama()
    file.set("general.architecture", gb.STRING, b"\xc3")
    _refused(write(file), "general.architecture", "UTF-8")


def _split(file: Gguf, tmp_path: Path, count: int = 3) -> list[Path]:
    paths = []
    for number in range(count):
        part = Gguf(metadata=list(file.metadata) if number == 0 else [])
        part.tensors = file.tensors[number::count]
        part.set("split.no", gb.U16, number)
        part.set("split.count", gb.U16, count)
        part.set("split.tensors.count", gb.I32, len(file.tensors))
        paths.append(tmp_path / f"tiny-{number + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(part.to_bytes())
    return paths


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(tiny_llama(layers=2).to_bytes())
    expected = open_checkpoint(str(whole))
    folder = tmp_path / "split"
    folder.mkdir()
    paths = _split(tiny_llama(layers=2), folder)
    for ref in (folder, paths[0], paths[2]):  # any part stands for all
        found = open_checkpoint(str(ref))
        assert found.path == paths[0]
        assert found.spec == expected.spec
        assert set(found.tensors) == set(expected.tensors)
        assert found.nbytes == sum(p.stat().st_size for p in paths)
        for name, raw in expected.tensors.items():
            for key, part in raw.parts.items():
                np.testing.assert_array_equal(found.tensors[name].parts[key], part)


def test_split_files_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = _split(tiny_llama(), tmp_path)
    second = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"-00002-of-00003.gguf is missing \(1 of 3"):
        read_gguf(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"part 2 of 3.*expected part 1 of 3"):
        read_gguf(paths[0])
    paths[1].write_bytes(second)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    _refused(renamed, "NAME-00001-of-00003.gguf")


def test_split_that_lost_tensors_or_has_them_twice(tmp_path: Path) -> None:
    file = tiny_llama()
    paths = _split(file, tmp_path)
    part = Gguf(tensors=file.tensors[1::3][:-1])
    for key, kind, number in (("split.no", gb.U16, 1), ("split.count", gb.U16, 3)):
        part.set(key, kind, number)
    paths[1].write_bytes(part.to_bytes())
    _refused(paths[0], f"{len(file.tensors) - 1} tensors", f"is {len(file.tensors)}")
    part.tensors.append(file.tensors[0])
    paths[1].write_bytes(part.to_bytes())
    with pytest.raises(CheckpointError, match=r"token_embd.*is in .*00001.*and in .*00002"):
        read_gguf(paths[0])
