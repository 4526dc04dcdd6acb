"""Fake-quantised attention: a whole window at once, in float32, with keys and values that have been
through a format and back. Equal to the paged kernels (tests/parity/test_fake_attention.py), and fast
enough to run real models over long texts on a CPU.

The variants ``direct`` and ``paper`` exist here only: ``paper`` subtracts frozen means of a whole
sequence from queries and keys and adds the product of the mean query with each key unquantised. Its
means belong to one request, so its pages cannot be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.core.kv_formats import KEY_GROUP
from headrace.core.numeric import E2M1_VALUES, E4M3_VALUES
from headrace.formats.packing import lookup
from headrace.ops.records import AttentionBatch
from headrace.ops.reference.sealing import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_codes,
    e4m3_codes,
    grouped,
    read_keys,
    read_values,
    seal,
    ungrouped,
)
from headrace.ops.registry import Op, OpSet

# Query rows of one call: their mask is what takes memory. A multiple of every page size.
ROWS = 512


@dataclass(frozen=True)
class Variant:
    """One way to store keys and values, and to use queries and probabilities.

    keys: f32 | bf16 | fp8 (a scale per page) | nvfp4 (as it is) | paged (the product's NVFP4)
    values: f32 | bf16 | fp8 (a scale per page) | nvfp4 (groups of 16 tokens)
    queries: exact | nvfp4; probabilities: exact | nvfp4
    means: subtract the window's means of queries and keys, and compensate (``paper``)
    first: rows of the first page whose keys stay in bf16; rank: residual scalars
    own_page: rows see the bf16 form of their own page, as in the product
    """

    name: str
    keys: Literal["f32", "bf16", "fp8", "nvfp4", "paged"] = "f32"
    values: Literal["f32", "bf16", "fp8", "nvfp4"] = "f32"
    queries: Literal["exact", "nvfp4"] = "exact"
    probabilities: Literal["exact", "nvfp4"] = "exact"
    means: bool = False
    centred: bool = True
    first: bool = True
    rank: int = 0
    own_page: bool = False
    page: int = 64
    contiguous: bool = False  # groups of 16 neighbours instead of 8 and 8 half a head apart


# The most important first: a run that is stopped has those.
VARIANTS: tuple[Variant, ...] = (
    Variant("float32"),
    Variant("bf16", "bf16", "bf16"),
    Variant("fp8", "fp8", "fp8", own_page=True),
    Variant("direct", "nvfp4", "fp8", contiguous=True),
    Variant("nvfp4k-fp8v, R = 4", "paged", "fp8", rank=4, own_page=True),
    Variant("nvfp4k-fp8v, R = 0", "paged", "fp8", own_page=True),
    Variant("paper", "nvfp4", "fp8", "nvfp4", means=True, contiguous=True),
    Variant("direct, queries too", "nvfp4", "fp8", "nvfp4", contiguous=True),
    Variant("centred", "paged", "fp8", first=False),
    Variant("full NVFP4", "nvfp4", "nvfp4", "nvfp4", "nvfp4", contiguous=True),
)


def nvfp4(x: torch.Tensor, *, contiguous: bool = True) -> torch.Tensor:
    """x [..., D] through NVFP4 and back, with E4M3 scales of 16 and no outer scale."""
    groups = x.unflatten(-1, (-1, 1, KEY_GROUP)) if contiguous else grouped(x)
    scale = lookup(E4M3_VALUES, e4m3_codes(groups.abs().amax((-2, -1)) / E2M1_MAX))
    step = scale[..., None, None]
    back = lookup(E2M1_VALUES, e2m1_codes(groups, step)) * step
    return back.flatten(-3) if contiguous else ungrouped(back)


class FakeAttention:
    """What replaces ``kv_append`` and attention: one layer after another, one window at a time.

    directions: float32 [layers, Hkv, R, D], for variants with a rank
    """

    def __init__(self, variant: Variant, directions: torch.Tensor | None = None) -> None:
        self.variant = variant
        self.directions = directions

    def ops(self, ops: OpSet) -> OpSet:
        """``ops`` with this attention in place of theirs."""
        chosen = {n: op for n, op in ops.chosen.items() if n != "attention_block"}
        for name in ("attention_prefill", "attention_decode"):
            chosen[name] = Op(name, "fake", self.attend, 0.0)
        chosen["kv_append"] = Op("kv_append", "fake", self.append, 0.0)
        return OpSet(chosen)

    @staticmethod
    def caches(num_layers: int) -> list[Any]:
        return [_Window(i) for i in range(num_layers)]

    @staticmethod
    def batch(num_tokens: int) -> AttentionBatch:
        positions = torch.arange(num_tokens)
        return AttentionBatch(
            query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
            context_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=torch.zeros((1, 1), dtype=torch.int32),
            positions=positions,
            slots=positions,
            decode=False,
        )

    def append(self, k: torch.Tensor, v: torch.Tensor, cache: _Window, slots: torch.Tensor) -> None:
        cache.keys, cache.values = k.transpose(0, 1), v.transpose(0, 1)

    def attend(
        self,
        q: torch.Tensor,
        cache: _Window,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]; sinks are not needed by the models measured."""
        assert sinks is None
        along = None if self.directions is None else self.directions[cache.layer]
        return fake_attention(q, cache.keys, cache.values, self.variant, scale, window, along)


@dataclass
class _Window:
    layer: int
    keys: torch.Tensor = torch.empty(0)
    values: torch.Tensor = torch.empty(0)


def fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float,
    window: int | None = None,
    directions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a whole window. q [T, H, D]; k, v [Hkv, T, D]; returns [T, H, D]."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[0]
    queries = q.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, group, T, D]
    keys, values = _stored(k, v, variant, directions)
    own = (k.bfloat16().float(), v.bfloat16().float()) if variant.own_page else None
    if variant.means:
        queries, keys = _compensated(queries, k, scale)
    elif variant.queries == "nvfp4":
        queries = nvfp4(queries)
    out = torch.empty(kv_heads, heads // kv_heads, tokens, dim)
    for start in range(0, tokens, ROWS):
        stop = min(tokens, start + ROWS)
        first = 0 if window is None else max(0, start - window + 1) // variant.page * variant.page
        parts = [(keys[:, first:stop], values[:, first:stop], torch.arange(first, stop), False)]
        if own is not None:
            # A row's own page may start before its block of rows does only if ROWS were no multiple.
            here = torch.arange(start, stop)
            parts.append((own[0][:, start:stop], own[1][:, start:stop], here, True))
        hidden = torch.cat(
            [
                _hidden(torch.arange(start, stop), at, variant, window, is_own)
                for *_, at, is_own in parts
            ],
            1,
        )
        some = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)
        mixed = _mix(queries[:, :, start:stop], *some, hidden, scale, variant)
        out[:, :, start:stop] = mixed
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim).contiguous()


def _hidden(
    rows: torch.Tensor, keys: torch.Tensor, variant: Variant, window: int | None, own: bool
) -> torch.Tensor:
    """Which of ``keys`` each row does not see, bool [rows, keys]."""
    distance = rows[:, None] - keys
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if variant.own_page:
        same = rows[:, None] // variant.page == keys // variant.page
        hidden |= ~same if own else same
    return hidden


def _mix(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    variant: Variant,
) -> torch.Tensor:
    """q [Hkv, group, n, D'], keys [Hkv, L, D'], values [Hkv, L, D] -> [Hkv, group, n, D]."""
    kv_heads, group, rows, _ = q.shape
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    if variant.probabilities == "exact":
        wide = q.flatten(1, 2)[None]
        padded = (
            values
            if keys.shape[-1] == values.shape[-1]
            else torch.nn.functional.pad(values, (0, keys.shape[-1] - values.shape[-1]))
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(
            wide, keys[None], padded[None], attn_mask=mask.repeat(group, 1), scale=scale
        )
        return mixed[0, ..., : values.shape[-1]].view(kv_heads, group, rows, -1)
    scores = q @ keys.transpose(1, 2).unsqueeze(1) * scale + mask
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    pad = -p.shape[-1] % KEY_GROUP
    p = torch.nn.functional.pad(p, (0, pad))
    # Two levels: a row's largest probability uses the largest scale and the largest code.
    outer = p.amax(-1, keepdim=True) / (E4M3_MAX * E2M1_MAX)
    p = nvfp4(p / outer) * outer
    return p @ torch.nn.functional.pad(values, (0, 0, 0, pad)).unsqueeze(1) / total


def _compensated(
    q: torch.Tensor, k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's queries and keys, with the compensation as one more dimension of both.

    q.k = (q - qm).(k - km) + qm.(k - km) + q.km; the last term is the same for all keys of a row.
    """
    key_mean = k.mean(1, keepdim=True).bfloat16().float()
    query_mean = q.mean(2, keepdim=True).bfloat16().float()  # one for each query head
    centred = k - key_mean
    # [Hkv, group, T]: each query head has its own compensation, so its keys differ in one column.
    extra = (centred.unsqueeze(1) @ query_mean.transpose(-2, -1)).squeeze(-1).bfloat16().float()
    group = q.shape[1]
    keys = torch.cat((nvfp4(centred), extra.transpose(1, 2)), -1)
    columns = (
        torch.eye(group).expand(k.shape[0], group, group)[:, :, None].expand(-1, -1, q.shape[2], -1)
    )
    return torch.cat((nvfp4(q - query_mean), columns), -1), keys


def _stored(
    k: torch.Tensor, v: torch.Tensor, variant: Variant, directions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a reader finds them once their pages are full: [Hkv, T, D] each."""
    tokens = k.shape[1]
    keys = {"f32": k, "bf16": k.bfloat16().float()}.get(variant.keys)
    if variant.keys == "nvfp4":
        keys = nvfp4(k, contiguous=variant.contiguous)
    values = {"f32": v, "bf16": v.bfloat16().float()}.get(variant.values)
    if variant.values == "nvfp4":
        padded = torch.nn.functional.pad(v, (0, 0, 0, -tokens % KEY_GROUP))
        values = nvfp4(padded.transpose(1, 2).contiguous()).transpose(1, 2)[:, :tokens]
    if keys is None or values is None:
        pages = [_paged(x, variant.page) for x in (k, v)]
        first = torch.zeros(pages[0].shape[0], dtype=torch.bool)
        first[0] = variant.first and tokens >= variant.page
        along = directions[:, : variant.rank] if directions is not None and variant.rank else None
        sealed = seal(*pages, nvfp4=variant.keys == "paged", first=first, directions=along)
        if keys is None:
            keys = read_keys(sealed, along).transpose(0, 1).flatten(1, 2)[:, :tokens]
            if bool(first[0]) and variant.keys == "paged":
                keys[:, :KEY_GROUP] = k[:, :KEY_GROUP].bfloat16().float()
        if values is None:
            values = read_values(sealed).transpose(0, 1).flatten(1, 2)[:, :tokens]
    return keys, values


def _paged(x: torch.Tensor, page: int) -> torch.Tensor:
    """[Hkv, T, D] -> bfloat16 [pages, Hkv, page, D]; the last one is filled up with its last row."""
    missing = -x.shape[1] % page
    if missing:
        x = torch.cat((x, x[:, -1:].expand(-1, missing, -1)), 1)
    return x.unflatten(1, (-1, page)).transpose(0, 1).bfloat16()
