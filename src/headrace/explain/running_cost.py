"""Work of one step of a loaded model, class by class: from its stored matrices and the step's rows.

Unlike a plan, which works from a configuration alone, this counts the bytes that the checkpoint has.
Formulas are the catalogue's (``step.toml``, ``attention.toml``, ``mixture.toml``). On a machine without
a GPU activations stay in the CPU's caches and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.model_spec import ModelSpec
from headrace.explain import leaf
from headrace.explain.catalogue.functions import distinct, pairs, window_pairs
from headrace.explain.cost import Work, on_cpu

ACTIVATION_NBYTES = 4  # float32 rows between kernels
LOGIT_NBYTES = 4
# The sampler's passes over the logits of a greedy row: one. With truncation they are three.
SAMPLER_PASSES = 1

# Which matrices, by ``Decoder.matrices``' names, each class multiplies with.
MATRICES: Mapping[str, tuple[str, ...]] = {
    leaf.QKV: ("q", "k", "v"),
    leaf.O_PROJECTION: ("o",),
    leaf.DENSE_FFN: ("gate", "up", "down"),
    leaf.ROUTER: ("router",),
    leaf.EXPERTS_GPU: ("expert",),
    leaf.LM_HEAD: ("lm_head",),
    leaf.EMBED: ("embed",),
}


@dataclass(frozen=True)
class Stored:
    """All matrices of one kind: how many, their elements and bytes, numeric format, and one's shape."""

    count: int
    elements: int
    nbytes: int
    format: str
    rows: int = 0
    cols: int = 0


@dataclass(frozen=True)
class RunningModel:
    """What a loaded model's steps cost depends on. kv_nbytes: bytes of a cached element.

    misses_of_twice_the_slots: the share of missing experts that twice the cache's slots would leave;
    None without a cache of experts.
    """

    spec: ModelSpec
    matrices: Mapping[str, Stored]
    kv_nbytes: float
    kv_format: str
    gpu: bool = False
    block_tokens: int = 32  # of the cache
    misses_of_twice_the_slots: float | None = None

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all matrices; a tied head's are the embedding's."""
        tied = "lm_head" if self.spec.tie_embeddings else ""
        return sum(stored.nbytes for kind, stored in self.matrices.items() if kind != tied)


@dataclass(frozen=True)
class StepRows:
    """Rows of a step: (new tokens, tokens in the cache before) of each sequence; rows of logits."""

    sequences: tuple[tuple[int, int], ...]
    sampled: int

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.sequences)

    @property
    def decode(self) -> bool:
        """One new token in every sequence."""
        return all(new == 1 for new, _ in self.sequences)


def decode_rows(batch: int, cached: int, new: int = 1) -> StepRows:
    """``batch`` sequences alike."""
    return StepRows(((new, cached),) * batch, batch)


@dataclass(frozen=True)
class ClassWork:
    """One class of a step: calls of operations, their work, and the matrices' share of its bytes."""

    calls: int
    work: Work
    matrix_nbytes: float = 0.0


def running_cost(model: RunningModel, rows: StepRows) -> dict[str, ClassWork]:
    """Every class of the step that computes, by id, in the order of the step."""
    counted = _Counting(model, rows).classes()
    if model.gpu:
        return counted
    return {
        name: ClassWork(one.calls, on_cpu(one.work), one.matrix_nbytes)
        for name, one in counted.items()
    }


def attention_cost(model: RunningModel, rows: StepRows) -> tuple[str, ClassWork]:
    """The one class whose work grows with the cache, by id."""
    ident = leaf.ATTENTION_DECODE if rows.decode else leaf.ATTENTION_PREFILL
    work = _Counting(model, rows).attention()
    return ident, ClassWork(model.spec.num_layers, work if model.gpu else on_cpu(work))


@dataclass(frozen=True)
class _Counting:
    model: RunningModel
    rows: StepRows

    def classes(self) -> dict[str, ClassWork]:
        spec, tokens, layers = self.model.spec, self.rows.tokens, self.model.spec.num_layers
        mixtures = sum(layer.moe for layer in spec.layers)
        heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        norms = 2 * layers + 1
        width = spec.num_heads * spec.head_dim
        found = {
            leaf.EMBED: self.embed(),
            leaf.RMSNORM: ClassWork(norms, self.moved(2 * norms * tokens * spec.hidden, 4)),
            leaf.QKV: self.matrix(leaf.QKV, layers, layers * (spec.hidden + heads)),
            leaf.ROPE: ClassWork(layers, self.moved(2 * layers * tokens * heads, 3)),
            leaf.KV_APPEND: ClassWork(layers, self.append()),
            leaf.ATTENTION_DECODE if self.rows.decode else leaf.ATTENTION_PREFILL: ClassWork(
                layers, self.attention()
            ),
            leaf.O_PROJECTION: self.matrix(
                leaf.O_PROJECTION, layers, layers * (width + spec.hidden)
            ),
        }
        if mixtures < layers:
            dense = layers - mixtures
            inner = dense * (3 * spec.hidden + 2 * spec.intermediate)
            found[leaf.DENSE_FFN] = self.matrix(leaf.DENSE_FFN, 2 * dense, inner)
        if spec.moe is not None and mixtures:
            inner = mixtures * (spec.hidden + spec.moe.num_experts)
            found[leaf.ROUTER] = self.matrix(leaf.ROUTER, 2 * mixtures, inner)
            found[leaf.EXPERTS_GPU] = self.experts(mixtures)
        sampled = self.rows.sampled
        head = self.matrix(leaf.LM_HEAD, 1, spec.hidden + spec.vocab, sampled)
        logits = sampled * spec.vocab
        sampling = Work(
            vector_flops=float(logits), hbm_nbytes=float(SAMPLER_PASSES * logits * LOGIT_NBYTES)
        )
        return found | {leaf.LM_HEAD: head, leaf.SAMPLING: ClassWork(sampled, sampling)}

    def moved(self, elements: float, flops: float) -> Work:
        """Activations read and written: ``elements`` in all, half of them results."""
        nbytes = elements * ACTIVATION_NBYTES if self.model.gpu else 0.0
        return Work(vector_flops=flops * elements / 2, hbm_nbytes=nbytes)

    def embed(self) -> ClassWork:
        stored = self.model.matrices["embed"]
        row = stored.nbytes / stored.elements * self.model.spec.hidden
        return ClassWork(1, Work(hbm_nbytes=self.rows.tokens * row))

    def matrix(
        self, name: str, calls: int, row_elements: int, rows: int | None = None
    ) -> ClassWork:
        """All matrices of a class times the step's rows (or ``rows``); each is read once."""
        kinds = [
            self.model.matrices[kind] for kind in MATRICES[name] if kind in self.model.matrices
        ]
        rows = self.rows.tokens if rows is None else rows
        if not rows:
            return ClassWork(0, Work())
        nbytes = float(sum(stored.nbytes for stored in kinds))
        elements = sum(stored.elements for stored in kinds)
        moved = rows * row_elements * ACTIVATION_NBYTES if self.model.gpu else 0.0
        work = Work(tensor_flops={"bf16": 2.0 * rows * elements}, hbm_nbytes=nbytes + moved)
        return ClassWork(calls, work, nbytes)

    def experts(self, mixtures: int) -> ClassWork:
        moe, stored = self.model.spec.moe, self.model.matrices.get("expert")
        if moe is None or stored is None:
            return ClassWork(0, Work())
        one = stored.elements / mixtures / moe.num_experts
        used = distinct(moe.num_experts, moe.num_experts_per_token, self.rows.tokens)
        nbytes = stored.nbytes * used / moe.num_experts
        flops = 2.0 * self.rows.tokens * moe.num_experts_per_token * mixtures * one
        return ClassWork(mixtures, Work(tensor_flops={"bf16": flops}, hbm_nbytes=nbytes), nbytes)

    def append(self) -> Work:
        spec = self.model.spec
        elements = 2 * spec.num_layers * self.rows.tokens * spec.num_kv_heads * spec.head_dim
        read = elements * ACTIVATION_NBYTES if self.model.gpu else 0.0
        return Work(hbm_nbytes=elements * self.model.kv_nbytes + read)

    def attention(self) -> Work:
        """Pairs and kept keys of the layers of each window."""
        spec = self.model.spec
        met = kept = 0.0
        for window, layers in Counter(layer.window for layer in spec.layers).items():
            for new, cached in self.rows.sequences:
                if window is None:
                    met += layers * pairs(new, cached)
                    kept += layers * (new + cached)
                else:
                    met += layers * window_pairs(new, cached, window)
                    kept += layers * min(new + cached, window + new - 1)
        rows = 2 * spec.num_layers * self.rows.tokens * spec.num_heads * spec.head_dim
        moved = rows * ACTIVATION_NBYTES if self.model.gpu else 0.0
        cache = 2 * spec.num_kv_heads * spec.head_dim * self.model.kv_nbytes * kept
        return Work(
            tensor_flops={"bf16": 4.0 * spec.num_heads * spec.head_dim * met},
            special_ops=spec.num_heads * met,
            hbm_nbytes=cache + moved,
        )


def classes_of(names: Sequence[str]) -> dict[str, str]:
    """Kind of matrix -> class, for those of ``names`` that a class multiplies with."""
    return {kind: name for name, kinds in MATRICES.items() for kind in kinds if kind in names}


def rate_name(ident: str) -> str:
    """A class's id as a part of a rate's name."""
    return ident.replace("-", "_")
