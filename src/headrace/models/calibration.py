"""Residual directions: along which directions of a key readers look, measured on a short text.

For each layer and key/value head, U holds the eigenvectors of E[q q^T] with the largest eigenvalues,
over the queries (behind norm and RoPE) of all heads that read it. An error of a key along U is what
scores feel most, and a sealed page corrects it with one scalar per direction and token
(``headrace.ops.records.SealedKV``). The directions depend on the weights alone once the text is fixed.

The text is short, a context is long, and RoPE turns its slow dimensions little within a short text:
readers further on look elsewhere. What a layer computes depends on distances alone, so the same
queries at other positions are the measured ones turned further; the average is over those of the whole
context (SmolLM2 at 8,192 tokens: KL to float32 0.0048 instead of 0.0056,
benchmarks/attention/accuracy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import cast

import torch

from headrace.core.model_spec import ModelSpec
from headrace.models.decoder import Decoder
from headrace.ops.records import AttentionBatch, LayerKV, RopeTable
from headrace.ops.registry import Op, OpSet

# Tokens of a step: the memory of the activations stays small.
_CHUNK = 512
_BLOCK = 64
# Places of the text within the context that are averaged over, and the furthest that is looked at.
_PLACES = 64
LONGEST = 131_072


def calibration_text() -> str:
    """The built-in text: prose, code, tables, dialogue and three more languages, 1,400 tokens."""
    return (files("headrace") / "embedded" / "calibration.txt").read_text(encoding="utf-8")


def query_moments(
    load: Callable[[OpSet], Decoder],
    ops: OpSet,
    token_ids: Sequence[int],
    progress: Callable[[str, float], None] | None = None,
) -> torch.Tensor:
    """E[q q^T] over a text placed all over the context, float64 [layers, Hkv, D, D].

    load: builds the decoder on the operations that it is given, with tables for as many positions as
    shall be looked at; token_ids: the text; progress: told stage and share after each part of it.
    """

    def tell(stage: str, share: float) -> None:
        if progress is not None:
            progress(stage, share)

    attend, rope = ops.chosen["attention_prefill"].function, ops.chosen["rope"].function
    moments: dict[int, torch.Tensor] = {}
    tables: dict[int, RopeTable] = {}
    latest: list[RopeTable] = []

    def turned(x: torch.Tensor, table: RopeTable, positions: torch.Tensor) -> torch.Tensor:
        latest[:] = [table]
        return rope(x, table, positions)

    def observed(
        q: torch.Tensor, cache: LayerKV, batch: AttentionBatch, *rest: object
    ) -> torch.Tensor:
        kv_heads = cache.keys.shape[1]
        # [Hkv, group * T, D]: all queries that read the same keys
        rows = q.view(q.shape[0], kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        wide = rows.double()
        found = wide.transpose(1, 2) @ wide
        moments[id(cache)] = moments[id(cache)] + found if id(cache) in moments else found
        if latest:
            tables[id(cache)] = latest[0]
        return attend(q, cache, batch, *rest)

    chosen = {n: op for n, op in ops.chosen.items() if n != "attention_block"}
    chosen["rope"] = Op("rope", "calibration", turned, 0.0)
    for name in ("attention_prefill", "attention_decode"):
        chosen[name] = Op(name, "calibration", observed, 0.0)
    decoder = load(OpSet(chosen))
    kv = _cache(decoder.spec, len(token_ids))
    for start in range(0, len(token_ids), _CHUNK):
        part = list(token_ids[start : start + _CHUNK])
        decoder.forward(torch.tensor(part), _batch(start, len(part)), kv)
        tell("measuring queries", (start + len(part)) / len(token_ids))
    count = len(token_ids) * (decoder.spec.num_heads // decoder.spec.num_kv_heads)
    found = [(moments[id(cache)] / count, tables.get(id(cache))) for cache in kv]
    placed: list[torch.Tensor] = []
    for layer, (one, table) in enumerate(found):
        placed.append(one if table is None else over_context(one, table, len(token_ids)))
        tell("placing the text over the context", (layer + 1) / len(found))
    return torch.stack(placed)


def over_context(moments: torch.Tensor, table: RopeTable, num_tokens: int) -> torch.Tensor:
    """The mean of R_o M R_o^T over offsets o, from 0 to where the text ends with the table.

    moments: M, float64 [Hkv, D, D]; num_tokens: the text's. R_o turns by o positions, as RoPE does.
    """
    last = max(0, table.cos.shape[0] - num_tokens)
    total = torch.zeros_like(moments)
    for place in range(_PLACES):
        turn = _rotation(table, round(last * place / (_PLACES - 1)), moments.shape[-1])
        total += turn @ moments @ turn.T
    return total / _PLACES


def _rotation(table: RopeTable, position: int, width: int) -> torch.Tensor:
    """RoPE at a position as a matrix, float64 [D, D], without the attention factor."""
    factor = table.cos[0].double()  # of position 0: the cosine is 1
    cos, sin = table.cos[position].double() / factor, table.sin[position].double() / factor
    half = cos.shape[0]
    pair = torch.arange(half)
    first, second = (2 * pair, 2 * pair + 1) if table.interleaved else (pair, pair + half)
    turn = torch.eye(width, dtype=torch.float64)
    turn[first, first], turn[second, second] = cos, cos
    turn[first, second], turn[second, first] = -sin, sin
    return turn


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
