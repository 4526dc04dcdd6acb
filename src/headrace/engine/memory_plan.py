"""Where the memory goes, before it is used: weights, KV, workspace, reserve. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import DoesNotFitError
from headrace.core.model_spec import ModelSpec

# Resident memory of our processes beside the planned parts. Measured 2026-11-29 on Linux x86-64,
# Python 3.11: 237 MB with torch 2.13 (CPU) and tokenizers imported; the HTTP process about 100 MB;
# the rest is slack for allocators that do not return what they free.
RESERVE_NBYTES = 512 * 2**20

# Query rows that the plain PyTorch attention scores at once (ops.reference.attention.QUERY_ROWS).
_REFERENCE_QUERY_ROWS = 256


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of host memory by purpose, against a budget."""

    weights_nbytes: int
    kv_nbytes: int
    workspace_nbytes: int
    reserve_nbytes: int
    budget_nbytes: int

    @property
    def total_nbytes(self) -> int:
        return self.weights_nbytes + self.kv_nbytes + self.workspace_nbytes + self.reserve_nbytes

    @property
    def headroom_nbytes(self) -> int:
        """What the budget leaves; negative if the plan does not fit."""
        return self.budget_nbytes - self.total_nbytes

    def describe(self) -> str:
        """One line with every part."""
        return (
            f"weights {megabytes(self.weights_nbytes)} + KV {megabytes(self.kv_nbytes)} + workspace "
            f"{megabytes(self.workspace_nbytes)} + reserve {megabytes(self.reserve_nbytes)} = "
            f"{megabytes(self.total_nbytes)} of {megabytes(self.budget_nbytes)}"
        )

    def require_fit(self, hint: str) -> None:
        """Refuse a plan that exceeds the budget.

        Raises:
            DoesNotFitError: with every part of the plan.
        """
        if self.headroom_nbytes < 0:
            raise DoesNotFitError(
                f"the model does not fit: {self.describe()} ({megabytes(-self.headroom_nbytes)} missing)",
                hint=hint,
            )


def workspace_nbytes(
    spec: ModelSpec, *, context: int, max_batch_tokens: int, max_num_seqs: int, backend: str
) -> int:
    """Bytes that the largest step needs beside weights and KV: an upper bound.

    Counted for the worst layer, whose intermediate results live at the same time, for a prefill
    chunk of ``max_batch_tokens`` that ends at the end of the context; then the logits of
    ``max_num_seqs`` rows. The plain PyTorch back-end also writes out attention scores and one
    dequantised matrix at a time.
    """
    tokens, f32 = max_batch_tokens, 4
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    # residual, normalised, attention output and the next residual; q, k, v before and after norm
    attention = tokens * (4 * spec.hidden + 2 * heads + spec.num_heads * spec.head_dim)
    width = spec.intermediate if any(not layer.moe for layer in spec.layers) else 0
    if spec.moe is not None:
        # each token's experts side by side: gate, up and their product, then down's outputs
        moe = spec.moe
        width = max(width, moe.num_experts_per_token * (moe.intermediate + spec.hidden // 2))
    feed_forward = tokens * (4 * spec.hidden + 3 * width)
    # raw logits, the sampler's float32 weights, float64 sums and ids of one row
    logits = max_num_seqs * spec.vocab + 6 * spec.vocab
    rotary = context * sum(
        (rope or spec.rope).dim for rope in {layer.rope for layer in spec.layers}
    )
    elements = max(attention, feed_forward, logits) + rotary
    if backend == "reference":
        rows = min(_REFERENCE_QUERY_ROWS, tokens)
        scores = 4 * spec.num_heads * rows * context  # scores, scaled, masked, softmax
        gathered = 4 * spec.num_kv_heads * spec.head_dim * context
        matrix = max(spec.vocab, spec.intermediate) * spec.hidden
        elements += max(scores + gathered, 2 * matrix)
    return elements * f32


def megabytes(nbytes: int) -> str:
    """As plans print bytes: in megabytes, and in kilobytes or bytes where those would be next to none."""
    if 0 < abs(nbytes) < 10**6:
        return f"{nbytes / 1e3:,.0f} kB" if abs(nbytes) >= 1000 else f"{nbytes} B"
    return f"{nbytes / 1e6:,.0f} MB"
