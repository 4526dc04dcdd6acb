"""Launches of the kernels that take any slab format, layer by layer."""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.ops.records import Activation
from headrace.ops.triton.expert_blocks import block_down, block_gate_up
from headrace.ops.triton.expert_geometry import SliceGeometry
from headrace.ops.triton.expert_state import PlanState
from headrace.ops.triton.expert_terms import has_terms, term_words, terms_of_rows

TERM_BLOCK = 32  # activations that share a unit
BLOCKS_AT_ONCE = 8  # of a program that cuts an activation into terms


# Formats whose scales are four a row and step: with fewer warps they are exchanged (``expert_terms``).
_SCALES_FOR_ALL = ("q6_k", "q4_0")


@dataclass(frozen=True)
class BlockTuning:
    """Grids and tiles; programs are for each multiprocessor."""

    programs: int = 4
    warps: int = 4
    rows: int = 16  # of down, and of gate and up by floats
    columns: int = 256  # at once, for the longest rows, by floats
    terms: bool = True  # integer products where there are any
    gate_up_programs: int = 2
    gate_up_warps: int = 8
    gate_up_rows: int = 64  # by integers; 64 make one block of what down multiplies


class BlockLauncher:
    """Gate/up and down of layers in any formats.

    Args:
        layers: of each layer.
        partial: float32 [pairs, slices, hidden], where results go.
    """

    def __init__(
        self,
        layers: Sequence[SliceGeometry],
        state: PlanState,
        arena: torch.Tensor,
        partial: torch.Tensor,
        act: Activation,
        multiprocessors: int,
        tuning: BlockTuning | None = None,
    ) -> None:
        self.tuning = tuning or BlockTuning()
        self._layers, self._state, self._arena = tuple(layers), state, arena
        self._partial, self._act, self._sms = partial, act, multiprocessors
        g = self._layers[0]
        pairs, device = partial.shape[0], partial.device
        self._h = torch.zeros(pairs, g.width * g.num_slices, device=device)
        self._gate_up_terms = [self._by_terms(one, 0) for one in self._layers]
        self._down_terms = [self._by_terms(one, 1) for one in self._layers]
        self._terms = self._h_terms = state.counts
        if any(self._gate_up_terms):
            words = term_words(g.hidden)
            self._terms = torch.zeros(
                state.geometry.max_tokens, words, dtype=torch.int32, device=device
            )
        if any(self._down_terms):
            words = g.num_slices * term_words(g.width)
            self._h_terms = torch.zeros(pairs, words, dtype=torch.int32, device=device)

    def _by_terms(self, g: SliceGeometry, which: int) -> bool:
        columns = (g.hidden, g.width)[which]
        return self.tuning.terms and has_terms(g.places[which].format, columns)

    def _joined(self, layer: int) -> bool:
        """Whether gate and up leave what down multiplies in terms."""
        both = self._gate_up_terms[layer] and self._down_terms[layer]
        return both and self.tuning.gate_up_rows == 2 * TERM_BLOCK

    def prepare(self, x: torch.Tensor) -> None:
        """Give x, float32 [T, hidden], to the kernels."""
        if any(self._gate_up_terms):
            self._cut(x, self._terms, x.shape[0], self._layers[0].hidden)

    def _cut(self, rows: torch.Tensor, terms: torch.Tensor, count: int, columns: int) -> None:
        blocks = -(-columns // TERM_BLOCK)
        terms_of_rows[(count, -(-blocks // BLOCKS_AT_ONCE))](
            rows, terms, columns, BLOCKS_AT_ONCE, num_warps=4
        )

    def gate_up(self, layer: int, x: torch.Tensor, entries: torch.Tensor, which: int) -> None:
        """h = act(gate x, up x) for ``counts[which]`` entries. x: float32 [T, hidden]."""
        g, t, act = self._layers[layer], self.tuning, self._act
        place, (codes, scales, bias) = g.places[0], g.gate_up
        by_terms = self._gate_up_terms[layer]
        programs, warps, rows = t.programs, t.warps, t.rows
        if by_terms:
            programs, warps, rows = t.gate_up_programs, t.gate_up_warps, t.gate_up_rows
            if place.format in _SCALES_FOR_ALL:
                warps = max(warps, rows // 4)
        block_gate_up[(programs * self._sms,)](
            self._arena, entries, self._state.counts, self._state.pair_token, x, self._terms,
            self._h, self._h_terms, which, g.slice_nbytes, codes, scales, place.factors, bias,
            place.code_stride, place.scale_stride, place.format, place.factor_kind, g.has_bias,
            g.hidden, g.width, g.num_slices, act.kind == "swiglu_clamped", act.alpha, act.limit,
            _columns(g.hidden, t.columns), rows, by_terms, self._joined(layer), num_warps=warps,
        )  # fmt: skip

    def down(self, layer: int, entries: torch.Tensor, which: int) -> None:
        """partial = weight * (down h + bias)."""
        g, t = self._layers[layer], self.tuning
        place, (codes, scales, bias) = g.places[1], g.down
        if self._down_terms[layer] and not self._joined(layer):
            self._cut(self._h, self._h_terms, len(self._h) * g.num_slices, g.width)
        block_down[(t.programs * self._sms,)](
            self._arena, entries, self._state.counts, self._state.pair_weight, self._h,
            self._h_terms, self._partial, which, g.slice_nbytes, codes, scales, place.factors, bias,
            place.code_stride, place.scale_stride, place.format, place.factor_kind, g.has_bias,
            g.hidden, g.width, g.num_slices, _columns(g.width, t.columns), t.rows,
            self._down_terms[layer], num_warps=t.warps,
        )  # fmt: skip


def _columns(columns: int, most: int) -> int:
    """Columns at once: a power of two, so that a row is few whole steps."""
    return min(most, 1 << (columns - 1).bit_length())
