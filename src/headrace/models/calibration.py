"""Residual directions: along which directions of a key readers look, measured on a short text.

For each layer and key/value head, U holds the eigenvectors of E[q q^T] with the largest eigenvalues,
over the queries (behind norm and RoPE) of all heads that read it. An error of a key along U is what
scores feel most, and a sealed page corrects it with one scalar per direction and token
(``headrace.ops.records.SealedKV``). The directions depend on the weights alone once the text is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import cast

import torch

from headrace.core.model_spec import ModelSpec
from headrace.models.decoder import Decoder
from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.registry import Op, OpSet

# Tokens of a step: the memory of the activations stays small.
_CHUNK = 512
_BLOCK = 64


def calibration_text() -> str:
    """The built-in text: prose, code, tables, dialogue and three more languages, 1,400 tokens."""
    return (files("headrace") / "embedded" / "calibration.txt").read_text(encoding="utf-8")


def query_moments(
    load: Callable[[OpSet], Decoder], ops: OpSet, token_ids: Sequence[int]
) -> torch.Tensor:
    """E[q q^T] over a text, float64 [layers, Hkv, D, D].

    load: builds the decoder on the operations that it is given; token_ids: the text.
    """
    attend = ops.chosen["attention_prefill"].function
    moments: dict[int, torch.Tensor] = {}

    def observed(
        q: torch.Tensor, cache: LayerKV, batch: AttentionBatch, *rest: object
    ) -> torch.Tensor:
        kv_heads = cache.keys.shape[1]
        # [Hkv, group * T, D]: all queries that read the same keys
        rows = q.view(q.shape[0], kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        wide = rows.double()
        found = wide.transpose(1, 2) @ wide
        moments[id(cache)] = moments[id(cache)] + found if id(cache) in moments else found
        return attend(q, cache, batch, *rest)

    chosen = {n: op for n, op in ops.chosen.items() if n != "attention_block"}
    for name in ("attention_prefill", "attention_decode"):
        chosen[name] = Op(name, "calibration", observed, 0.0)
    decoder = load(OpSet(chosen))
    kv = _cache(decoder.spec, len(token_ids))
    for start in range(0, len(token_ids), _CHUNK):
        part = list(token_ids[start : start + _CHUNK])
        decoder.forward(torch.tensor(part), _batch(start, len(part)), kv)
    group = decoder.spec.num_heads // decoder.spec.num_kv_heads
    return torch.stack([moments[id(cache)] for cache in kv]) / (len(token_ids) * group)


def directions(moments: torch.Tensor, rank: int) -> torch.Tensor:
    """The ``rank`` leading eigenvectors as rows: [..., D, D] -> float32 [..., rank, D].

    The sign of each is chosen so that its largest component is positive: results do not depend on
    the linear-algebra library's choice.
    """
    found = cast("tuple[torch.Tensor, torch.Tensor]", torch.linalg.eigh(moments))  # pyright: ignore[reportUnknownMemberType]
    vectors: torch.Tensor = found[1].flip(-1)[..., :rank].transpose(-2, -1)
    largest: torch.Tensor = vectors.gather(-1, vectors.abs().argmax(-1, keepdim=True))
    return (vectors * torch.sign(largest)).float().contiguous()


def _cache(spec: ModelSpec, num_tokens: int) -> list[LayerKV]:
    shape = (-(-num_tokens // _BLOCK), spec.num_kv_heads, _BLOCK, spec.head_dim)
    return [LayerKV(torch.empty(shape), torch.empty(shape)) for _ in spec.layers]


def _batch(start: int, count: int) -> AttentionBatch:
    positions = torch.arange(start, start + count)
    return AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([start + count], dtype=torch.int32),
        block_tables=torch.arange(-(-(start + count) // _BLOCK), dtype=torch.int32)[None],
        positions=positions,
        slots=positions,
        decode=False,
    )
