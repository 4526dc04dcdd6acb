"""A Llama forward in float64 NumPy straight from a GGUF file: the oracle of the perplexity bar.

It shares no code with Headrace: weights come from the ``gguf`` package's dequantisation, and the
equations are written out once, for readability and not for speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

Array = npt.NDArray[np.float64]


class LlamaFloat64:
    """GGUF architecture ``llama`` with tied embeddings; q and k rows are paired (0, 1), (2, 3)."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        meta: dict[str, Any] = {k: f.contents() for k, f in reader.fields.items()}
        self.weights: dict[str, Array] = {
            t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self.num_layers = int(meta["llama.block_count"])
        self.heads = int(meta["llama.attention.head_count"])
        self.kv_heads = int(meta["llama.attention.head_count_kv"])
        self.head_dim = int(meta["llama.embedding_length"]) // self.heads
        self.eps = float(meta["llama.attention.layer_norm_rms_epsilon"])
        self.theta = float(meta["llama.rope.freq_base"])

    def _norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def _rope(self, x: Array) -> Array:
        """x: [heads, tokens, head_dim]; positions 0, 1, 2, ..."""
        inverse = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angle = np.outer(np.arange(x.shape[1]), inverse)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    def log_probs(self, ids: list[int]) -> Array:
        """log p(ids[t + 1] | ids[: t + 1]) for t = 0 .. len(ids) - 2."""
        w, n = self.weights, len(ids)
        x = w["token_embd.weight"][ids]
        hidden_above = np.triu(np.full((n, n), -np.inf), 1)
        group = self.heads // self.kv_heads
        for i in range(self.num_layers):
            p = f"blk.{i}."
            h = self._norm(x, w[p + "attn_norm.weight"])

            def split(name: str, heads: int, h: Array = h, p: str = p) -> Array:
                return (h @ w[p + name].T).reshape(n, heads, self.head_dim).transpose(1, 0, 2)

            q = self._rope(split("attn_q.weight", self.heads))
            k = np.repeat(self._rope(split("attn_k.weight", self.kv_heads)), group, axis=0)
            v = np.repeat(split("attn_v.weight", self.kv_heads), group, axis=0)
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(self.head_dim) + hidden_above
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            o = (scores / scores.sum(-1, keepdims=True)) @ v
            x = x + o.transpose(1, 0, 2).reshape(n, -1) @ w[p + "attn_output.weight"].T
            h = self._norm(x, w[p + "ffn_norm.weight"])
            gate = h @ w[p + "ffn_gate.weight"].T
            ffn = gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up.weight"].T)
            x = x + ffn @ w[p + "ffn_down.weight"].T
        head = w.get("output.weight", w["token_embd.weight"])
        logits = self._norm(x, w["output_norm.weight"])[:-1] @ head.T
        top = logits.max(-1, keepdims=True)
        log_z = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
        return logits[np.arange(n - 1), ids[1:]] - log_z
