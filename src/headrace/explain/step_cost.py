"""The leaves of one step: which classes run how often, and what work each is.

Formulas (d hidden, W weights of a matrix, b bytes a weight, T tokens of the step, B sequences):

- a matrix: 2 T W FLOPs; W b bytes once a step, plus T rows in and out in bfloat16
- experts: 2 T k W_e FLOPs a layer; bytes of the distinct experts that T tokens choose,
  E (1 - (1 - k/E)^T) for uniform routing (the expected number of distinct boxes)
- attention: 2 (score_dim + value_dim) FLOPs for each head and each pair of query and key that meet;
  decode reads each sequence's kept keys once; prefill meets n^2/2 pairs of its own tokens, and n a pairs
  with a keys that were there before
- sampling: four bytes of float32 logits, read and written

``step_time`` turns leaves into seconds. Pure arithmetic: no torch, no clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.core.kv_formats import FORMATS as KV_FORMATS
from headrace.core.plan_spec import AttentionKind, PlanSpec
from headrace.explain import leaf
from headrace.explain.catalogue.functions import distinct
from headrace.explain.cost import Work, on_cpu

ACTIVATION_NBYTES = 2  # bfloat16 rows between kernels
_HEAD = 128  # of a typical model; the share of scales does not depend on it
# Bits an element of the cache by the name of its format, keys and values together, without what a page
# shares (two scales and a centre: under 2% at 64 tokens a page) and without residual scalars.
KV_BITS: dict[str, float] = {
    name: 8
    * (fmt.key_nbytes(_HEAD, 0) + _HEAD * (1 if fmt.sealed else fmt.element_nbytes))
    / (2 * _HEAD)
    for name, fmt in KV_FORMATS.items()
}


@dataclass(frozen=True)
class StepShape:
    """``batch`` sequences that bring ``new_tokens`` each to ``context`` cached ones each."""

    phase: Literal["decode", "prefill"]
    batch: int = 1
    new_tokens: int = 1
    context: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens


@dataclass(frozen=True)
class Placement:
    """Which bytes lie where. Shares are of bytes or of look-ups, between 0 and 1.

    gpu: False computes everything on the CPU, and the other fields but ``kv_format`` say nothing
    dense_on_gpu: of the layers outside the experts; the rest is computed by the CPU
    head_on_gpu: whether the output head is
    hit_rate: of the experts that the step uses, how many lie in VRAM
    fetch_share: of the others, how many travel over the link; the CPU computes the rest
    disk_share: of the others, how many have to be read from the disk first
    at_once: so many tokens of a prompt's chunk at a time take the experts that were routed, hits, fetches
        and the CPU's beside each other as in decoding; 0: all that miss travel, layer after layer
    """

    gpu: bool = True
    dense_on_gpu: float = 1.0
    head_on_gpu: bool = True
    hit_rate: float = 1.0
    fetch_share: float = 0.0
    disk_share: float = 0.0
    at_once: int = 0
    kv_format: str = "bf16"


Path = Literal["gpu", "cpu", "hits", "fetch", "fetched", "misses", "host"]


@dataclass(frozen=True)
class Leaf:
    """One class in one place: ``calls`` kernels or wakes, and the work of all of them.

    ``path``: "gpu" and "cpu" are one after the other; "hits", "fetch" with "fetched", and "misses"
    (on the CPU) may run beside each other. ``blocks``: thread blocks of one call where that is what
    limits it (attention that does not split a sequence), else 0.
    """

    id: str
    calls: int
    work: Work
    path: Path
    blocks: int = 0


def step_leaves(spec: PlanSpec, shape: StepShape, placement: Placement) -> list[Leaf]:
    """Every leaf of the step, in the order in which they first run."""
    before, after = fixed_leaves(spec, shape, placement)
    return [*before, *expert_leaves(spec, shape, placement), *after]


def fixed_leaves(
    spec: PlanSpec, shape: StepShape, placement: Placement
) -> tuple[list[Leaf], list[Leaf]]:
    """What the experts' rates and shares in ``placement`` do not change: before the experts, and after."""
    builder = _Builder(spec, shape, placement)
    return builder.dense_leaves(), builder.ends()


def expert_leaves(spec: PlanSpec, shape: StepShape, placement: Placement) -> list[Leaf]:
    """Router and experts, by where they lie."""
    return _Builder(spec, shape, placement).expert_leaves()


@dataclass(frozen=True)
class _Builder:
    spec: PlanSpec
    shape: StepShape
    placement: Placement

    @property
    def on_gpu(self) -> float:
        return self.placement.dense_on_gpu if self.placement.gpu else 0.0

    def matrix(self, weights: int, kind: str, rows: int, columns: int, tokens: int) -> Work:
        """``weights`` elements in one or more matrices that multiply ``tokens`` rows, on the GPU."""
        moved = tokens * (rows + columns) * ACTIVATION_NBYTES
        return Work(
            tensor_flops={"bf16": 2.0 * tokens * weights},
            hbm_nbytes=weights * self.spec.bits(kind) / 8 + moved,
        )

    def split(self, name: str, calls: int, work: Work, blocks: int = 0) -> list[Leaf]:
        """``work`` of the GPU, shared with the CPU as the layers are."""
        share, found = self.on_gpu, list[Leaf]()
        if share > 0:
            found.append(Leaf(name, calls, work.scale(share), "gpu", blocks))
        if share < 1:
            found.append(Leaf(name, calls, on_cpu(work.scale(1 - share)), "cpu"))
        return found

    def dense_leaves(self) -> list[Leaf]:
        """Embedding, norms, attention and dense feed-forwards."""
        spec, tokens = self.spec, self.shape.tokens
        row = spec.hidden * ACTIVATION_NBYTES
        norms = 2 * spec.num_layers + 1
        found = [
            *self.split(leaf.EMBED, 1, Work(hbm_nbytes=2.0 * tokens * row)),
            *self.split(
                leaf.RMSNORM,
                norms,
                Work(
                    vector_flops=4.0 * norms * tokens * spec.hidden,
                    hbm_nbytes=2.0 * norms * tokens * row,
                ),
            ),
        ]
        for kind in spec.attention:
            found += self.attention(kind)
        for kind, layers, weights in (
            ("dense", spec.dense_layers, spec.dense_weights),
            ("shared", spec.moe_layers, spec.shared_weights),
        ):
            if layers * weights:
                inner = layers * weights // (3 * spec.hidden)
                work = self.matrix(layers * weights, kind, inner, layers * spec.hidden, tokens)
                found += self.split(leaf.DENSE_FFN, layers, work)
        return found

    def attention(self, kind: AttentionKind) -> list[Leaf]:
        """One kind of attention: projections, cache, and the attention itself."""
        spec, shape, layers, tokens = self.spec, self.shape, kind.layers, self.shape.tokens
        width = kind.heads * kind.value_dim
        inward = self.matrix(
            layers * kind.qkv_weights, "attention", layers * spec.hidden, 0, tokens
        )
        outward = self.matrix(layers * kind.o_weights, "attention", layers * width, 0, tokens)
        bits = KV_BITS[self.placement.kv_format]
        written = (
            layers
            * tokens
            * (kind.cached / kind.stride + kind.index_cached / kind.stride)
            * bits
            / 8
        )
        decode = shape.phase == "decode"
        name = leaf.ATTENTION_DECODE if decode else leaf.ATTENTION_PREFILL
        return [
            *self.split(leaf.QKV, layers, inward),
            *self.split(leaf.KV_APPEND, layers, Work(hbm_nbytes=written)),
            *self.split(
                name, layers, self.attend(kind, bits), shape.batch * kind.kv_heads if decode else 0
            ),
            *self.split(leaf.O_PROJECTION, layers, outward),
        ]

    def attend(self, kind: AttentionKind, bits: float) -> Work:
        """Scores, softmax and values of all layers of one kind."""
        shape = self.shape
        end = shape.context + shape.new_tokens
        pairs = shape.batch * _pairs(kind, shape.context, shape.new_tokens)
        index = shape.batch * _mean_length(shape) * shape.new_tokens / kind.stride
        flops, width = self.products(kind, pairs)
        flops += 2.0 * kind.index_heads * kind.index_cached * index
        nbytes = shape.batch * kind.attended(end) * kind.cached * bits / 8
        nbytes += shape.batch * end // kind.stride * kind.index_cached * bits / 8
        if kind.state:  # a state is read and written once for each token that is not chunked away
            flops += 6.0 * shape.tokens * kind.state
            nbytes += 8.0 * shape.batch * kind.state
        moved = shape.tokens * kind.heads * width * ACTIVATION_NBYTES
        return Work(
            tensor_flops={"bf16": flops},
            special_ops=float(kind.heads * pairs),
            hbm_nbytes=nbytes + moved,
        ).scale(kind.layers)

    def products(self, kind: AttentionKind, pairs: float) -> tuple[float, int]:
        """FLOPs of scores and values in one layer, and the elements of a head's query and result.

        Latent attention of a prompt is cheaper with keys and values made from the latent (192 and 128
        elements a head in DeepSeek-V3, for 576 and 512) unless few tokens come after many, whose keys and
        values have to be made once more; an index chooses from the latent.
        """
        width = kind.score_dim + kind.value_dim
        folded = 2.0 * kind.heads * width * pairs
        if self.shape.phase == "decode" or not kind.nope_dim or kind.top_keys is not None:
            return folded, width
        value = kind.o_weights // (kind.heads * self.spec.hidden)
        narrow = kind.nope_dim + kind.score_dim - kind.value_dim + value
        again = self.shape.batch * self.shape.context * kind.value_dim * (kind.nope_dim + value)
        unfolded = 2.0 * kind.heads * (narrow * pairs + again)
        return min((folded, width), (unfolded, narrow))

    def expert_leaves(self) -> list[Leaf]:
        """Router and experts, by where they lie."""
        spec, place, tokens = self.spec, self.placement, self.shape.tokens
        if not spec.moe_layers:
            return []
        layers = spec.moe_layers
        router = self.matrix(
            layers * spec.router_weights, "router", spec.num_experts, spec.hidden, tokens
        )
        found = self.split(leaf.ROUTER, layers, router)
        pieces = [tokens]
        if place.at_once:
            whole, rest = divmod(tokens, place.at_once)
            pieces = [place.at_once] * whole + [rest] * (rest > 0)
        mixture = spec.num_experts, spec.num_experts_per_token
        used = layers * sum(distinct(*mixture, piece) for piece in pieces)
        layers *= len(pieces)  # each layer's experts are called for each piece
        hit = place.hit_rate if place.gpu else 0.0
        fetched = (1 - hit) * place.fetch_share if place.gpu else 0.0
        missed = 1 - hit - fetched
        disk = (1 - hit) * place.disk_share * used * spec.expert_nbytes
        if hit:
            found.append(Leaf(leaf.EXPERTS_GPU, layers, self.experts(used, hit), "hits"))
        if fetched:
            nbytes = used * fetched * spec.expert_nbytes
            move = Work(
                pcie_nbytes=nbytes, dram_nbytes=nbytes, disk_nbytes=disk * fetched / (1 - hit)
            )
            found.append(Leaf(leaf.EXPERT_FETCH, layers, move, "fetch"))
            found.append(Leaf(leaf.EXPERTS_GPU, layers, self.experts(used, fetched), "fetched"))
        if missed > 1e-12:
            work = on_cpu(self.experts(used, missed))
            work = work + Work(disk_nbytes=disk * missed / max(1 - hit, 1e-12))
            name = leaf.EXPERTS_CPU if place.gpu else leaf.EXPERTS_GPU
            found.append(Leaf(name, layers, work, "misses"))
            if place.gpu:
                found.append(Leaf(leaf.FLAG, layers, Work(host_s=FLAG_S * layers), "host"))
        return found

    def experts(self, used: float, share: float) -> Work:
        """The part ``share`` of the chosen experts' work, as if on the GPU."""
        spec, tokens = self.spec, self.shape.tokens
        chosen = spec.moe_layers * tokens * spec.num_experts_per_token
        moved = chosen * 2 * spec.hidden * ACTIVATION_NBYTES
        return Work(
            tensor_flops={"bf16": 2.0 * chosen * spec.expert_weights},
            hbm_nbytes=used * spec.expert_nbytes + moved,
        ).scale(share)

    def ends(self) -> list[Leaf]:
        """Output head and sampling, for the last token of each sequence."""
        spec, batch = self.spec, self.shape.batch
        head = spec.vocab * spec.hidden
        kind = "embedding" if spec.tied else "lm_head"
        work = self.matrix(head, kind, spec.vocab, spec.hidden, batch)
        sample = Work(
            hbm_nbytes=2.0 * 4 * batch * spec.vocab, special_ops=float(batch * spec.vocab)
        )
        if self.placement.gpu and self.placement.head_on_gpu:
            return [Leaf(leaf.LM_HEAD, 1, work, "gpu"), Leaf(leaf.SAMPLING, 1, sample, "gpu")]
        return [
            Leaf(leaf.LM_HEAD, 1, on_cpu(work), "cpu"),
            Leaf(leaf.SAMPLING, 1, on_cpu(sample), "cpu"),
        ]


# GPU -> CPU thread -> GPU through a flag in pinned memory, inside a graph: 3.7 us (2026-11-29, H200
# machine, PCIe 5).
FLAG_S = 3.7e-6


def _mean_length(shape: StepShape) -> float:
    """Tokens that a query of the step sees on average."""
    return shape.context + (shape.new_tokens + 1) / 2


def _pairs(kind: AttentionKind, context: int, new: int) -> float:
    """Pairs of query and key of one sequence in one layer: the sum of ``attended`` over the queries.

    ``attended`` grows piecewise linearly, so the sum is taken at up to 64 points (trapezoids); at one
    new token it is exact, and without a limit the error is below one part in 10^6.
    """
    if new == 1:
        return float(kind.attended(context + 1))
    points = min(new, 64)
    ends = [context + 1 + round(i * (new - 1) / (points - 1)) for i in range(points)]
    counts = [kind.attended(end) for end in ends]
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(ends, ends[1:], counts, counts[1:]))
    return area * new / (new - 1)
