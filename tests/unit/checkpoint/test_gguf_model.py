"""From a GGUF file to a checkpoint: names, configuration, what is missing or too much."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint
from headrace.core.errors import CheckpointError, UnsupportedModelError
from tests.fixtures import gguf_bytes as gb
from tests.fixtures.gguf_bytes import Gguf, Tensor, tiny_llama


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Gguf], Checkpoint]:
    def write_and_open(file: Gguf) -> Checkpoint:
        # A new file each time: the last one is still mapped.
        path = tmp_path / f"model{len(list(tmp_path.iterdir()))}.gguf"
        path.write_bytes(file.to_bytes())
        return open_checkpoint(str(path))

    return write_and_open


Open = Callable[[Gguf], Checkpoint]


def test_reads_a_llama(opened: Open) -> None:
    checkpoint = opened(tiny_llama())
    spec = checkpoint.spec
    assert (spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 2, 1, 16)
    assert (spec.vocab, spec.max_context, spec.eos_token_ids) == (6, 128, (4,))
    assert checkpoint.rope_interleaved
    assert checkpoint.tensors["embed"].parts["data"].dtype == np.uint16
    assert checkpoint.tensors["layers.0.gate"].shape == (64, 32)


def test_a_stored_head_unties(opened: Open) -> None:
    file = tiny_llama()
    assert opened(file).spec.tie_embeddings
    file.tensors.append(Tensor("output.weight", (32, 6), 1, file.tensors[0].data))
    checkpoint = opened(file)
    assert not checkpoint.spec.tie_embeddings
    assert "lm_head" in checkpoint.tensors


def _gpt_oss(order: Callable[[list[Tensor]], list[Tensor]]) -> Gguf:
    hidden, inner, experts, vocab = 32, 32, 2, 4
    rng = np.random.default_rng(3)

    def floats(*dims: int) -> bytes:
        return rng.normal(size=dims).astype(np.float32).tobytes()

    def add(name: str, *dims: int) -> None:
        tensors.append(Tensor(name, tuple(reversed(dims)), 0, floats(*dims)))

    tensors: list[Tensor] = []
    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    add("output.weight", vocab, hidden)
    for name in ("attn_norm", "post_attention_norm"):
        add(f"blk.0.{name}.weight", hidden)
    for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", hidden)):
        add(f"blk.0.{name}.weight", rows, hidden)
        add(f"blk.0.{name}.bias", rows)
    add("blk.0.attn_sinks.weight", 2)
    add("blk.0.ffn_gate_inp.weight", experts, hidden)
    add("blk.0.ffn_gate_inp.bias", experts)
    for name in ("gate", "up", "down"):
        add(f"blk.0.ffn_{name}_exps.weight", experts, inner, hidden)
        add(f"blk.0.ffn_{name}_exps.bias", experts, inner)
    numbers: list[tuple[str, int, Any]] = [
        ("block_count", gb.U32, 1),
        ("context_length", gb.U32, 128),
        ("embedding_length", gb.U32, hidden),
        ("feed_forward_length", gb.U32, inner),
        ("expert_feed_forward_length", gb.U32, inner),
        ("attention.head_count", gb.U32, 2),
        ("attention.head_count_kv", gb.U32, 1),
        ("attention.key_length", gb.U32, 16),
        ("attention.value_length", gb.U32, 16),
        ("attention.layer_norm_rms_epsilon", gb.F32, 1e-5),
        ("attention.sliding_window", gb.U32, 8),
        ("rope.freq_base", gb.F32, 150000.0),
        ("rope.scaling.type", gb.STRING, "yarn"),
        ("rope.scaling.factor", gb.F32, 4.0),
        ("rope.scaling.original_context_length", gb.U32, 32),
        ("expert_count", gb.U32, experts),
        ("expert_used_count", gb.U32, 1),
        ("vocab_size", gb.U32, vocab),
    ]
    metadata = [("general.architecture", gb.STRING, "gpt-oss")]
    metadata += [(f"gpt-oss.{k}", t, v) for k, t, v in numbers]
    return Gguf(metadata=metadata, tensors=order(tensors))


def test_b008_biases_and_sinks_keep_their_places_in_any_order(opened: Open) -> None:
    # Twice the same model: once as written, once backwards, so that .bias comes before .weight.
    file, backwards = _gpt_oss(list), _gpt_oss(lambda t: t[::-1])
    written = {t.name: t.data for t in file.tensors}
    places = {
        "blk.0.ffn_gate_exps.weight": "layers.0.experts.gate",
        "blk.0.ffn_gate_exps.bias": "layers.0.experts.gate_bias",
        "blk.0.ffn_down_exps.bias": "layers.0.experts.down_bias",
        "blk.0.ffn_gate_inp.weight": "layers.0.router",
        "blk.0.ffn_gate_inp.bias": "layers.0.router_bias",
        "blk.0.attn_sinks.weight": "layers.0.sinks",
        "blk.0.attn_output.bias": "layers.0.o_bias",
    }
    for checkpoint in (opened(file), opened(backwards)):
        assert len(checkpoint.tensors) == len(file.tensors)
        for stored, canonical in places.items():
            raw = checkpoint.tensors[canonical]
            assert raw.source.endswith(stored)
            assert raw.parts["data"].tobytes() == written[stored]


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.bias", "blk.0.ffn_gate_exps.scale", "blk.0.attn_q", "mystery.weight"]
)
def test_b008_an_unknown_suffix_or_name_is_an_error(opened: Open, name: str) -> None:
    file = _gpt_oss(list)
    file.tensors.append(Tensor(name, (2,), 0, bytes(8)))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: the model has no place"):
        opened(file)


def test_missing_tensors_are_named_as_the_file_names_them(opened: Open) -> None:
    file = tiny_llama(layers=2)
    file.tensors = [t for t in file.tensors if t.name != "blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: blk\.1\.ffn_up\.weight"):
        opened(file)


def test_layers_beyond_the_configuration_have_no_place(opened: Open) -> None:
    file = tiny_llama(layers=2)
    file.set("llama.block_count", gb.U32, 1)
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight: the model has no place"):
        opened(file)


def test_shapes_come_from_the_configuration(opened: Open) -> None:
    file = tiny_llama()
    file.set("llama.feed_forward_length", gb.U32, 96)
    with pytest.raises(
        CheckpointError, match=r"ffn_gate\.weight: shape \[64, 32\], expected \[96, 32\]"
    ):
        opened(file)


def test_impossible_configurations_are_damage(opened: Open) -> None:
    file = tiny_llama()
    file.set("llama.attention.head_count", gb.U32, 0)
    with pytest.raises(CheckpointError, match=r"head_count = 0"):
        opened(file)
    file = tiny_llama()
    file.set("llama.block_count", gb.U32, 2**32 - 1)  # nobody makes a list of that length
    with pytest.raises(CheckpointError, match="4294967295 layers, but there are only 11 tensors"):
        opened(file)
    file = tiny_llama()
    file.set("llama.attention.head_count", gb.ARRAY, (gb.STRING, ["x"]))
    with pytest.raises(CheckpointError, match="head_count holds 'x', expected numbers"):
        opened(file)


def test_architectures_that_are_not_implemented(opened: Open) -> None:
    file = tiny_llama()
    file.set("general.architecture", gb.STRING, "rwkv7")
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7' is not implemented\n.*llama"):
        opened(file)
    file.metadata = file.metadata[:-1]
    with pytest.raises(CheckpointError, match=r"no general\.architecture"):
        opened(file)


def test_several_chat_templates_are_left_to_the_text_side(opened: Open) -> None:
    file = tiny_llama()
    file.set("tokenizer.chat_template", gb.STRING, "plain")
    assert opened(file).text.chat_template == "plain"
    file.set("tokenizer.chat_template.tool_use", gb.STRING, "tools")
    text = opened(file).text
    assert text.chat_template is None
    assert text.gguf is not None
    assert text.gguf["tokenizer.chat_template.tool_use"] == "tools"
