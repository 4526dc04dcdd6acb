"""Where the GPU's memory goes, before it is used. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.block_planes import EXPAND_NBYTES
from headrace.core.errors import DoesNotFitError
from headrace.core.model_spec import ModelSpec
from headrace.core.step import PIECE_ROWS
from headrace.core.weight_shapes import num_parameters
from headrace.engine.memory_plan import megabytes, workspace_nbytes

ELEMENT_NBYTES = {"f32": 4, "f16": 2, "bf16": 2}

# What the driver takes for a process that runs torch and Triton kernels, and cuBLAS's workspace (32 MiB
# on Hopper). The engine measures the first once it runs and bounds its tensors by what is really left.
CONTEXT_NBYTES = 640 * 2**20
# Executables of captured graphs and of kernels, and the allocator's rounding (blocks of 2 MiB).
RESERVE_NBYTES = 128 * 2**20
# What PyTorch's allocator reserves, of what is allocated. H200, gpt-oss-120b's sizes, 2026-11-30: 1.15 to
# 1.29 for chunks of 2,048 to 16,384 tokens, which peaked within 5 % above ``streamed_nbytes``.
ALLOCATOR_SHARE = 1.4
# Pairs of an expert up to which outputs are float32 (``ops.triton.expert_chunk``).
_FEW_PAIRS = 33
# Parts that decoding attention cuts a row's keys into at most (ops.triton.attention_decode).
_ATTENTION_PARTS = 128
# What prefill attention lays a past out in at most, for heads of this size and chunks of so many rows
# (ops.triton.prefill_layout).
_LAID_OUT_NBYTES, _LAID_OUT_DIM, _LAID_OUT_ROWS = 128 * 2**20, 128, 512


@dataclass(frozen=True)
class VramPlan:
    """Bytes of GPU memory by purpose, against a budget.

    graphs: what captured steps hold beside the workspace. experts: all of them, or the slots of the
    expert cache.
    """

    weights_nbytes: int
    kv_nbytes: int
    workspace_nbytes: int
    graphs_nbytes: int
    experts_nbytes: int
    budget_nbytes: int
    context_nbytes: int = CONTEXT_NBYTES
    reserve_nbytes: int = RESERVE_NBYTES

    @property
    def total_nbytes(self) -> int:
        return (
            self.weights_nbytes
            + self.kv_nbytes
            + self.workspace_nbytes
            + self.graphs_nbytes
            + self.experts_nbytes
            + self.context_nbytes
            + self.reserve_nbytes
        )

    @property
    def headroom_nbytes(self) -> int:
        """What the budget leaves; negative if the plan does not fit."""
        return self.budget_nbytes - self.total_nbytes

    def describe(self) -> str:
        """One line with every part."""
        parts = (
            ("weights", self.weights_nbytes),
            ("experts", self.experts_nbytes),
            ("KV", self.kv_nbytes),
            ("workspace", self.workspace_nbytes),
            ("graphs", self.graphs_nbytes),
            ("CUDA", self.context_nbytes),
            ("reserve", self.reserve_nbytes),
        )
        listed = " + ".join(f"{name} {megabytes(nbytes)}" for name, nbytes in parts if nbytes)
        return f"{listed} = {megabytes(self.total_nbytes)} of {megabytes(self.budget_nbytes)} of GPU memory"

    def require_fit(self, hint: str) -> None:
        """Refuse a plan that exceeds the budget.

        Raises:
            DoesNotFitError: with every part of the plan.
        """
        if self.headroom_nbytes < 0:
            raise DoesNotFitError(
                f"the model does not fit the GPU: {self.describe()} "
                f"({megabytes(-self.headroom_nbytes)} missing)",
                hint=hint,
            )


def dense_nbytes(spec: ModelSpec, dense_format: str) -> int:
    """Bytes of everything but experts: matrices in plain floats, vectors and routers float32.

    Counted as if biases and norms were matrices, which are too few to matter, but in float32.
    """
    counts = num_parameters(spec)
    matrices = counts.embedding + counts.lm_head + counts.attention + counts.dense_ffn
    return matrices * ELEMENT_NBYTES[dense_format] + 4 * (counts.router + counts.norm)


def gpu_workspace_nbytes(
    spec: ModelSpec,
    *,
    context: int,
    max_batch_tokens: int,
    max_num_seqs: int,
    streamed: bool = False,
    wide: bool = False,
) -> int:
    """Bytes that the largest step needs beside weights and KV: an upper bound.

    The rows that are computed at a time and what longer chunks keep of all rows, the parts that decoding
    attention leaves, and the past that prefill attention lays out.

    Args:
        streamed: experts pass through slots, so that what a step needs is known tensor by tensor.
        wide: see ``streamed_nbytes``.
    """
    common = {"context": context, "max_num_seqs": max_num_seqs}
    rows = min(max_batch_tokens, PIECE_ROWS)
    if streamed:
        least = workspace_nbytes(spec, max_batch_tokens=1, backend="triton", **common)
        step = max(least, int(ALLOCATOR_SHARE * streamed_nbytes(spec, max_batch_tokens, wide)))
    else:
        # The host's count, and the same activations in the dense type beside it (what cuBLAS multiplies).
        step = workspace_nbytes(spec, max_batch_tokens=rows, backend="triton", **common)
        step += step // 2
        if max_batch_tokens > rows:
            state, mixture = long_chunk_nbytes(spec, max_batch_tokens)
            step = state + max(step, mixture)
    attention = max_num_seqs * spec.num_heads * _ATTENTION_PARTS * (spec.head_dim + 2) * 4
    laid_out = 0
    if spec.head_dim == _LAID_OUT_DIM and max_batch_tokens >= _LAID_OUT_ROWS:
        sequences = min(max_num_seqs, max_batch_tokens // _LAID_OUT_ROWS)
        past = sequences * (context + _LAID_OUT_DIM)  # whole tiles of keys, 2 bytes a number
        laid_out = min(_LAID_OUT_NBYTES, 4 * spec.num_kv_heads * spec.head_dim * past)
    return step + attention + laid_out


def streamed_nbytes(spec: ModelSpec, tokens: int, wide: bool = False) -> int:
    """The most that lives at a time in a layer of a chunk whose experts pass through slots, without what the
    allocator adds.

    Of a piece's rows: the state before and after, normalised, the result; queries, keys, values, the same
    normalised, attention's output and its half; a dense layer's gate, up, product and halves; of a
    mixture, halves, each pair's activations and outputs. A mixture of a chunk longer than a piece:
    ``long_chunk_nbytes``.

    Args:
        wide: experts of formats without grouped kernels of their own (``core.numeric.GROUPED_FORMATS``): the
            outputs of all their pairs are float32.
    """
    rows, hidden = min(tokens, PIECE_ROWS), spec.hidden
    queries, keys = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    widest = 16 * hidden + 8 * (queries + keys) + 6 * queries
    if any(not layer.moe for layer in spec.layers):
        widest = max(widest, 18 * hidden + 14 * spec.intermediate)
    step = rows * widest
    if spec.moe is not None:
        moe = spec.moe
        pairs = rows * moe.num_experts_per_token
        # Outputs are float32 where there are few pairs for each expert.
        few = pairs if wide else min(pairs, _FEW_PAIRS * moe.num_experts)
        outputs = hidden * max(2 * pairs, 4 * few)
        step = max(step, rows * 18 * hidden + 2 * moe.intermediate * pairs + outputs)
    if tokens > rows:
        state, mixture = long_chunk_nbytes(spec, tokens)
        step = max(step, state + max(rows * widest, mixture))
    return step


def long_chunk_nbytes(spec: ModelSpec, tokens: int) -> tuple[int, int]:
    """What a chunk longer than a piece keeps of all its rows: (always, in a mixture).

    The state, float32. For a mixture what its experts read, in bfloat16; the activations of one expert,
    which all rows may have chosen; sorted pairs with their weights: ids and places of 4 and 8 bytes, twice,
    and what sorting takes.
    """
    rows = 4 * tokens * spec.hidden
    moe = spec.moe
    if moe is None:
        return rows, 0
    pairs = moe.num_experts_per_token * (4 * 4 + 3 * 8)
    return rows, tokens * (2 * spec.hidden + 2 * moe.intermediate + pairs)


def expand_nbytes(spec: ModelSpec) -> int:
    """Bytes of scratch memory that a prompt's products with packed matrices need."""
    widest = max(spec.num_heads * spec.head_dim, spec.intermediate, spec.vocab) * spec.hidden
    return min(EXPAND_NBYTES, 2 * widest)


def graphs_nbytes(spec: ModelSpec, *, max_num_seqs: int) -> int:
    """Bytes of the pool that captured steps share: a step's activations, its logits twice."""
    rows = min(max_num_seqs, 16)
    step = gpu_workspace_nbytes(spec, context=0, max_batch_tokens=rows, max_num_seqs=rows)
    return step + 4 * rows * spec.vocab


def page_scores_nbytes(
    spec: ModelSpec, *, context: int, block_tokens: int, max_num_seqs: int
) -> int:
    """Bytes that decoding over NVFP4 keys needs beside that: each page's reference vector times each query,
    float32, query heads of a key head padded to a power of two, 8 at least. Eager steps and the graphs'
    pool have them each.
    """
    group = max(1 << (spec.num_heads // spec.num_kv_heads - 1).bit_length(), 8)
    rows = max_num_seqs + min(max_num_seqs, 16)
    return rows * spec.num_kv_heads * -(-context // block_tokens) * group * 4


@dataclass(frozen=True)
class Workspace:
    """Bytes of the largest step, of up to ``batch`` tokens and ``seqs`` sequences, by context.

    packed: matrices are expanded for prompts; scored: tokens of a page whose reference vector is multiplied
    with queries by itself, 0: none; streamed, wide: see ``gpu_workspace_nbytes``
    """

    spec: ModelSpec
    batch: int
    seqs: int
    packed: bool
    scored: int
    streamed: bool = False
    wide: bool = False

    def __call__(self, context: int) -> int:
        spec, seqs = self.spec, self.seqs
        nbytes = gpu_workspace_nbytes(
            spec,
            context=context,
            max_batch_tokens=self.batch,
            max_num_seqs=seqs,
            streamed=self.streamed,
            wide=self.wide,
        )
        if self.packed:
            nbytes += expand_nbytes(spec)
        if self.scored:
            nbytes += page_scores_nbytes(
                spec, context=context, block_tokens=self.scored, max_num_seqs=seqs
            )
        return nbytes
