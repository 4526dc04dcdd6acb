"""Quantising a full page of keys and values, and reading it back: the definition, in plain PyTorch.

For one page of one key/value head, with k [P, D] and v [P, D] as bf16 stored them:

1. ``r`` = bf16(mean of k over the rows that are quantised); ``c`` = k - r in float32.
2. ``g`` = the least power of two with max |c| <= 448 * 6 * g; x = c / g (exact).
3. Each group of 16 channels gets ``s`` = E4M3(amax / 6), and the codes E2M1 nearest to x / s: midpoints
   times s are exact in float32, so a comparison decides, ties to the even code.
4. ``e`` = E4M3(U^T (c - g s E2M1) / (16 g)), R scalars per token.
5. ``vs`` = the least power of two with max |v| <= 448 * vs; value codes are E4M3(v / vs).

All roundings are to nearest, ties to even; scales are powers of two, so dividing by them is exact and
every implementation produces the same codes. Sums (the mean, U^T) run in float64, where bf16 inputs
make their order irrelevant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.core.kv_formats import FIRST_TOKENS, KEY_GROUP, RESIDUAL_UNIT
from headrace.core.numeric import E2M1_VALUES, E4M3_VALUES
from headrace.formats.packing import lookup
from headrace.ops.records import SealedKV

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Scales stay within 2^-100 to 2^100, far from float32's limits; smaller pages are stored as zero.
_EXPONENT_LIMIT = 100
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class SealedPages:
    """Quantised pages, leading dimensions [...] = [N, Hkv]; fields as in ``SealedKV``."""

    key_codes: torch.Tensor
    key_scales: torch.Tensor | None
    key_residuals: torch.Tensor | None
    key_refs: torch.Tensor | None
    value_codes: torch.Tensor
    page_scales: torch.Tensor


def e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    """float32 of magnitude up to 448 -> E4M3 codes, to nearest, ties to even, saturating."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least power of two s with amax <= largest * s, 1 where amax is 0: float32."""
    mantissa, exponent = torch.frexp(amax.float())
    top, shift = torch.frexp(torch.tensor(largest))
    exponent = exponent - shift + (mantissa > top).int()
    exponent = exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    one = torch.ones_like(amax, dtype=torch.float32)
    return torch.where(amax > 0, torch.ldexp(one, exponent), one)


def e2m1_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of x [...] against positive or zero scales that broadcast; zero scales give code 0."""
    magnitude = x.abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for code, middle in enumerate(_E2M1_MIDDLES):
        bound = middle * scale
        # a tie between code and code + 1 goes to the even one
        codes += (magnitude > bound) if code % 2 == 0 else (magnitude >= bound)
    codes = torch.where(scale > 0, codes, torch.zeros_like(codes))
    return codes | (torch.signbit(x) & (codes > 0)).to(torch.uint8) << 3


def grouped(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., D / 16, 2, 8]: the groups of channels that share a scale."""
    half = x.reshape(*x.shape[:-1], 2, x.shape[-1] // KEY_GROUP, KEY_GROUP // 2)
    return half.transpose(-3, -2)


def ungrouped(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``grouped``."""
    return x.transpose(-3, -2).flatten(-3)


def seal(
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    nvfp4: bool,
    first: torch.Tensor | None = None,
    directions: torch.Tensor | None = None,
) -> SealedPages:
    """Quantise full pages.

    keys, values: bfloat16 [N, Hkv, P, D]
    nvfp4: keys in NVFP4 relative to a reference vector, else in FP8 as they are
    first: bool [N], pages whose rows 0 to 15 are kept elsewhere and are not quantised (NVFP4 only)
    directions: float32 [Hkv, R, D] or None
    """
    k, v = keys.float(), values.float()
    value_scale = power_of_two_scale(v.abs().amax((-2, -1)), E4M3_MAX)
    value_codes = e4m3_codes(v / value_scale[..., None, None]).transpose(-2, -1).contiguous()
    if not nvfp4:
        scale = power_of_two_scale(k.abs().amax((-2, -1)), E4M3_MAX)
        scales = torch.stack((scale, value_scale), -1)
        return SealedPages(
            e4m3_codes(k / scale[..., None, None]), None, None, None, value_codes, scales
        )
    live = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if first is not None:
        live[:, :FIRST_TOKENS] = ~first[:, None]
    weight = live[:, None, :, None]
    count = live.sum(1).clamp(min=1)[:, None, None]
    refs = ((k.double() * weight).sum(-2) / count).float().bfloat16()
    centred = (k - refs.float().unsqueeze(-2)) * weight
    g = power_of_two_scale(centred.abs().amax((-2, -1)), E4M3_MAX * E2M1_MAX)
    unit = g[..., None, None]
    groups = grouped(centred / unit)
    key_scales = e4m3_codes(groups.abs().amax((-2, -1)) / E2M1_MAX)
    step = lookup(E4M3_VALUES, key_scales)[..., None, None]
    codes = e2m1_codes(groups, step)
    flat = ungrouped(codes)
    half = flat.shape[-1] // 2
    residuals = None
    if directions is not None:
        error = centred.double() - ungrouped(lookup(E2M1_VALUES, codes) * step).double() * unit
        along = error @ directions.double().transpose(-2, -1)
        residuals = e4m3_codes((along / (RESIDUAL_UNIT * unit)).float())
    return SealedPages(
        flat[..., :half] | flat[..., half:] << 4,
        key_scales,
        residuals,
        refs,
        value_codes,
        torch.stack((g, value_scale), -1),
    )


def read_keys(
    pages: SealedPages, directions: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The keys that attention sees, residuals included: ``dtype`` [N, Hkv, P, D].

    A residual adds (q U) . (16 g e) to a score, which is q . U (16 g e): it is part of the key.
    """
    g = pages.page_scales[..., 0, None, None].to(dtype)
    if pages.key_scales is None:
        return lookup(E4M3_VALUES, pages.key_codes).to(dtype) * g
    assert pages.key_refs is not None
    codes = torch.cat((pages.key_codes & 0xF, pages.key_codes >> 4), -1)
    step = lookup(E4M3_VALUES, pages.key_scales)[..., None, None].to(dtype)
    keys = ungrouped(grouped(lookup(E2M1_VALUES, codes).to(dtype)) * step) * g
    keys = keys + pages.key_refs.to(dtype).unsqueeze(-2)
    if pages.key_residuals is not None and directions is not None:
        along = lookup(E4M3_VALUES, pages.key_residuals).to(dtype) * (RESIDUAL_UNIT * g)
        keys = keys + along @ directions.to(dtype)
    return keys


def read_values(pages: SealedPages, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values that attention sees: ``dtype`` [N, Hkv, P, D]."""
    values = lookup(E4M3_VALUES, pages.value_codes).to(dtype).transpose(-2, -1)
    return values * pages.page_scales[..., 1, None, None].to(dtype)


def pages_of(cache: SealedKV, blocks: torch.Tensor) -> SealedPages:
    """The sealed pages of ``blocks``, int64 [N]."""

    def rows(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part[blocks]

    return SealedPages(
        cache.key_codes[blocks],
        rows(cache.key_scales),
        rows(cache.key_residuals),
        rows(cache.key_refs),
        cache.value_codes[blocks],
        cache.page_scales[blocks],
    )
