"""The shape of a model, read from its configuration: pure data, no weights and no torch.

The loader and the planner use the same record, so that what is planned is what is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. ``scaling`` names the rule that stretches it over long contexts.

    Sources: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al.
    2023), and Llama 3.1's banded rule.
    """

    theta: float
    dim: int  # rotated dimensions of a head
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: YaRN's 0.1 ln(factor) + 1
    truncate: bool = True  # YaRN: round the correction range to whole dimensions
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class MoeSpec:
    """The mixture of a layer.

    ``scoring``: "softmax_topk" takes the softmax over all experts and then the k largest (Mixtral's
    published order after renormalising, Qwen3-MoE, OLMoE); "topk_softmax" takes the k largest
    logits and the softmax over those (gpt-oss). ``normalize``: divide the k weights by their sum.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate: int
    scoring: Literal["softmax_topk", "topk_softmax"]
    normalize: bool
    router_bias: bool = False
    expert_bias: bool = False
    gate_up_interleaved: bool = False  # rows 2i are gate, 2i + 1 are up (gpt-oss)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: ``window`` tokens of attention (None: all of them), mixture or dense.

    ``rope``: a rotary embedding of this layer's own, None for the model's.
    """

    window: int | None
    moe: bool
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that is not a weight. Counts are in elements, not bytes."""

    family: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int  # of dense feed-forward layers
    norm_eps: float
    rope: RopeSpec
    max_context: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    moe: MoeSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # RMSNorm of q and k: per head or whole row
    sinks: bool = False  # one learned logit per head that joins the softmax
    post_norms: bool = False  # a norm behind attention and one behind the feed-forward (Gemma 3)
    embed_scale: float = 1.0  # multiplies embedded tokens
    attention_scale: float | None = None  # multiplies scores; None: head_dim ** -0.5
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelSpec:
        """Read a model's ``config.json`` (already parsed).

        Raises:
            UnsupportedModelError: no family here implements the architecture, or a key that would
                change the numerics is not implemented.
            ConfigError: a key is missing or has an impossible value.
        """
        from headrace.core.families import family_of

        return family_of(config).spec(config)

    def kv_nbytes_per_token(self, element_nbytes: int) -> int:
        """Bytes of keys and values that one token adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_nbytes
