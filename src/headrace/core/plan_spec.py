"""A model as the planner sees it: how many weights of each kind, and what a token keeps in the cache.

``ModelSpec`` describes what the engine can run, exactly. This record also describes what it cannot run
(latent attention, linear attention, compressed and indexed attention), in less detail: enough to add up
bytes and operations before a download. Pure data; ``core.plan_reading`` fills it from a config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.core.errors import ConfigError
from headrace.core.numeric import FORMATS

# Kinds of weights, in the order in which tables print them.
KINDS: tuple[str, ...] = (
    "embedding",
    "lm_head",
    "attention",
    "dense",
    "experts",
    "shared",
    "router",
    "norm",
)
BIAS_BITS = 16  # biases of experts are stored in bfloat16 beside quantised blocks (gpt-oss)


@dataclass(frozen=True)
class AttentionKind:
    """Layers whose attention is alike.

    ``cached`` elements are kept for each key that a layer keeps (keys and values of all heads, or one
    latent vector). A layer keeps one key for every ``stride`` tokens, at most ``window`` of them, plus
    the last ``recent`` uncompressed ones; a query attends to at most ``top_keys`` of them after an
    index of ``index_cached`` elements a key and ``index_heads`` heads has chosen. ``state`` elements
    are kept a sequence however long it is (linear attention), in float32. ``nope_dim``: of latent attention,
    the unrotated width of a head's query, 0 elsewhere.
    """

    name: str
    layers: int
    qkv_weights: int  # elements a layer that are multiplied before the attention, index included
    o_weights: int
    heads: int
    kv_heads: int
    score_dim: int  # elements of a key that one head multiplies
    value_dim: int
    cached: int
    window: int | None = None
    stride: int = 1
    recent: int = 0
    top_keys: int | None = None
    index_cached: int = 0
    index_heads: int = 0
    state: int = 0
    nope_dim: int = 0

    def keys(self, context: int) -> int:
        """Keys that one layer keeps of a sequence of ``context`` tokens."""
        if self.cached == 0:
            return 0
        kept = context // self.stride if self.stride > 1 else context
        if self.window is not None:
            kept = min(kept, self.window)
        return kept + min(self.recent, context)

    def attended(self, context: int) -> int:
        """Keys that one query at the end of ``context`` tokens multiplies with."""
        keys = self.keys(context)
        if self.top_keys is None:
            return keys
        return min(keys, self.top_keys + min(self.recent, context))

    def cached_elements(self, context: int) -> int:
        """Elements that one layer keeps of a sequence, without ``state``."""
        index = context // self.stride * self.index_cached
        return self.keys(context) * self.cached + index


@dataclass(frozen=True)
class PlanSpec:
    """Everything that a plan needs of a model. Counts are elements; bytes follow from ``formats``.

    ``formats`` names a format of ``core.numeric`` for each kind of ``KINDS``; ``stored_bits`` replaces it
    where a file mixes formats within a kind (the mean over the kind's tensors). ``extra_weights`` are
    stored in the checkpoint and not used by a plain step (heads that draft several tokens); they have
    the experts' format. ``notes`` say what of this is not verified.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    max_context: int
    attention: tuple[AttentionKind, ...]
    dense_layers: int
    dense_weights: int  # a dense layer's feed-forward
    moe_layers: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_weights: int = 0  # one expert, without biases
    expert_biases: int = 0
    shared_weights: int = 0  # experts of a mixture layer that every token uses
    router_weights: int = 0
    tied: bool = False
    extra_weights: int = 0
    formats: Mapping[str, str] = field(default_factory=dict[str, str])
    stored_bits: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.dense_layers + self.moe_layers

    @property
    def sparse(self) -> bool:
        """Whether there is anything to leave in host memory: experts that a token does not use."""
        return self.moe_layers > 0

    def bits(self, kind: str) -> float:
        """Bits a weight of ``kind``, scales included."""
        if kind in self.stored_bits:
            return self.stored_bits[kind]
        return FORMATS[self.formats.get(kind, "bf16")].bits_per_weight

    def weights(self) -> dict[str, int]:
        """Elements by kind. A tied head is counted once, as embedding; biases are not counted."""
        return {
            "embedding": self.vocab * self.hidden,
            "lm_head": 0 if self.tied else self.vocab * self.hidden,
            "attention": sum(a.layers * (a.qkv_weights + a.o_weights) for a in self.attention),
            "dense": self.dense_layers * self.dense_weights,
            "experts": self.moe_layers * self.num_experts * self.expert_weights,
            "shared": self.moe_layers * self.shared_weights,
            "router": self.moe_layers * self.router_weights,
            "norm": (2 * self.num_layers + 1) * self.hidden,
        }

    @property
    def total_weights(self) -> int:
        """Elements in all, without biases and without ``extra_weights``."""
        return sum(self.weights().values())

    @property
    def active_weights(self) -> int:
        """Elements that one token multiplies with: chosen experts only, no row of the embedding."""
        counts = self.weights()
        chosen = self.moe_layers * self.num_experts_per_token * self.expert_weights
        embedding = (
            counts["embedding"] if self.tied else 0
        )  # a tied table is multiplied as the head
        return self.total_weights - counts["experts"] - counts["embedding"] + chosen + embedding

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert as stored."""
        return round(
            (self.expert_weights * self.bits("experts") + self.expert_biases * BIAS_BITS) / 8
        )

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind."""
        found = {kind: round(n * self.bits(kind) / 8) for kind, n in self.weights().items()}
        found["experts"] = self.moe_layers * self.num_experts * self.expert_nbytes
        return found

    @property
    def weights_nbytes(self) -> int:
        """Bytes that have to lie somewhere to run."""
        return sum(self.nbytes().values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes outside the experts: what every token reads, and the embedding."""
        return self.weights_nbytes - self.nbytes()["experts"]

    @property
    def file_nbytes(self) -> int:
        """Bytes of the checkpoint, what a plain step does not use included."""
        return self.weights_nbytes + round(self.extra_weights * self.bits("experts") / 8)

    def kv_nbytes(self, context: int, bits: float) -> int:
        """Bytes that one sequence of ``context`` tokens keeps, at ``bits`` a cached element."""
        cached = sum(a.layers * a.cached_elements(context) for a in self.attention)
        state = sum(a.layers * a.state for a in self.attention)
        return round(cached * bits / 8) + 4 * state

    def with_formats(self, formats: Mapping[str, str]) -> PlanSpec:
        """The same model stored differently.

        Raises:
            ConfigError: a kind or a format does not exist.
        """
        for kind, name in formats.items():
            if kind not in KINDS or name not in FORMATS:
                raise ConfigError(
                    f"formats[{kind!r}] is {name!r}; kinds are {', '.join(KINDS)}, formats "
                    f"{', '.join(FORMATS)}",
                    param=f"formats[{kind!r}]",
                )
        kept = {kind: bits for kind, bits in self.stored_bits.items() if kind not in formats}
        return replace(self, formats={**self.formats, **formats}, stored_bits=kept)
