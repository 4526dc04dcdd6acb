"""The demo mixture in plain PyTorch: gpt-oss's architecture at a size that trains in minutes.

Training computes every expert for every token and weights the unchosen ones by zero. That wastes
FLOPs (experts / chosen times) but needs no grouped kernels, and at these widths one large matrix
product keeps the GPU busier than many small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FLOOR = 0.4  # part of the even share below which an expert counts as starving
NUDGE = 0.02  # a step's lift of the router's logit of an expert without any load
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's clamped SwiGLU


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture. Sliding-window and full attention alternate, the window first."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    intermediate: int
    vocab: int = 4096
    window: int = 128
    context: int = 1024
    theta: float = 10_000.0
    eps: float = 1e-5


SHAPES = {
    "toy": Shape(2, 64, 4, 2, 32, 8, 2, 32, vocab=512, window=16, context=64),
    "tiny": Shape(8, 256, 8, 2, 32, 32, 4, 64),
    "small": Shape(10, 384, 8, 2, 64, 64, 4, 128),
}


def fake_mxfp4(weight: Tensor, on: Tensor | float = 1.0) -> Tensor:
    """Round to MXFP4 and back along the last dimension; the gradient passes straight through.

    ``on`` is 1 to round, 0 to leave the weight alone.

    The scale of 32 values is 2^(floor(log2 max) - 2), as the OCP MX specification has it, so the
    largest lies in [4, 8) and saturates at 6.
    """
    blocks = weight.float().unflatten(-1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    x = (blocks / scale).abs().clamp_max(6.0)
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    rounded = torch.round(x / step) * step  # to even on the E2M1 grid
    quantised = (rounded * blocks.sign() * scale).flatten(-2).to(weight.dtype)
    return weight + (on * (quantised - weight)).detach()


def rope_table(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    inverse = shape.theta ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angle = torch.outer(torch.arange(shape.context, device=device), inverse)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """x: [batch, heads, tokens, head_dim]; pairs (0, dim / 2), (1, dim / 2 + 1), ..."""
    n = x.shape[-2]
    cos, sin = table[0][:n].to(x.dtype), table[1][:n].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped-query attention with a learned sink logit per head and an optional window."""

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q)
        self.k_proj = nn.Linear(shape.hidden, kv)
        self.v_proj = nn.Linear(shape.hidden, kv)
        self.o_proj = nn.Linear(q, shape.hidden)
        self.sinks = nn.Parameter(torch.zeros(shape.heads))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: object) -> Tensor:
        s, (b, n, _) = self.shape, x.shape
        q = rotate(self.q_proj(x).view(b, n, s.heads, s.head_dim).transpose(1, 2), table)
        k = rotate(self.k_proj(x).view(b, n, s.kv_heads, s.head_dim).transpose(1, 2), table)
        v = self.v_proj(x).view(b, n, s.kv_heads, s.head_dim).transpose(1, 2)
        if mask is not None:
            from torch.nn.attention.flex_attention import flex_attention

            out, lse = flex_attention(
                q,
                k,
                v,
                block_mask=mask,
                enable_gqa=True,
                return_lse=True,  # type: ignore[arg-type]
            )
        else:
            out, lse = self._plain(q, k, v)
        # softmax over the keys and the sink: the keys' share is sigmoid(lse - sink)
        share = torch.sigmoid(lse - self.sinks.float()[None, :, None])
        out = out * share[..., None].to(out.dtype)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.shape.head_dim)
        at = torch.arange(q.shape[-2], device=q.device)
        seen = at[:, None] >= at[None, :]
        if self.window is not None:
            seen &= at[:, None] - at[None, :] < self.window
        scores = scores.masked_fill(~seen, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


class Mixture(nn.Module):
    """Router and experts. ``load`` holds the last batch's share of tokens per expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e, d, i = shape.experts, shape.hidden, shape.intermediate
        self.shape = shape
        self.router = nn.Linear(d, e)
        self.gate = nn.Parameter(torch.randn(e, i, d) / math.sqrt(d))
        self.up = nn.Parameter(torch.randn(e, i, d) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(e, d, i) / math.sqrt(i * 2 * shape.layers))
        self.gate_bias = nn.Parameter(torch.zeros(e, i))
        self.up_bias = nn.Parameter(torch.zeros(e, i))
        self.down_bias = nn.Parameter(torch.zeros(e, d))
        # 1.0 rounds the experts; a tensor, so that a compiled graph serves both
        self.register_buffer("quantise", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [tokens, hidden] -> output, balance loss, share of the choices per expert."""
        s = self.shape
        logits = self.router(x).float()
        best, ids = logits.topk(s.chosen, -1)
        chosen = torch.zeros_like(logits).scatter(-1, ids, best.softmax(-1))
        share = torch.zeros_like(logits).scatter(-1, ids, 1.0).mean(0) / s.chosen
        # Switch Transformer's loss (Fedus et al. 2021): 1 when all experts are used alike
        balance = s.experts * (share.detach() * logits.softmax(-1).mean(0)).sum()
        gate, up, down = (fake_mxfp4(w, self.quantise) for w in (self.gate, self.up, self.down))
        g = F.linear(x, gate.flatten(0, 1), self.gate_bias.flatten()).clamp(max=LIMIT)
        u = F.linear(x, up.flatten(0, 1), self.up_bias.flatten()).clamp(-LIMIT, LIMIT)
        h = (g * torch.sigmoid(ALPHA * g) * (u + 1)).unflatten(-1, (s.experts, s.intermediate))
        p = chosen.to(h.dtype)
        h = (h * p[..., None]).flatten(-2)
        out = F.linear(h, down.permute(1, 0, 2).flatten(1)) + p @ self.down_bias.to(h.dtype)
        return out, balance, share


class Layer(nn.Module):
    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.attn = Attention(shape, window)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.moe = Mixture(shape)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], mask: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attn(self.attn_norm(x), table, mask)
        out, balance, share = self.moe(self.ffn_norm(x).flatten(0, 1))
        return x + out.view_as(x), balance, share


class MixtureModel(nn.Module):
    """Tied embeddings; even layers see ``window`` tokens, odd ones everything."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(
            Layer(shape, shape.window if i % 2 == 0 else None) for i in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        nn.init.normal_(self.embed.weight, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith("proj.weight") or name.endswith("router.weight"):
                nn.init.normal_(
                    p, std=0.02 if "o_proj" not in name else 0.02 / math.sqrt(2 * shape.layers)
                )
            elif name.endswith("proj.bias") or name.endswith("router.bias"):
                nn.init.zeros_(p)

    @torch.no_grad()
    def feed_the_starving(self, shares: Tensor, nudge: float = NUDGE) -> None:
        """Raise the router's bias of experts below ``FLOOR / experts`` of their layer's choices.

        shares: [layers, experts] of a batch. Favourites are left alone: a gradient that levels the
        load would do away with what a cache lives on, and a weak one never wakes an expert that
        nobody chooses (after the loss-free balancing of Wang et al. 2024, one-sided).
        """
        deficit = (1 - shares.detach() * (self.shape.experts / FLOOR)).clamp_min(0)
        for layer, lift in zip(self.layers, deficit):
            layer.moe.router.bias += nudge * lift  # type: ignore[union-attr]

    def quantise_experts(self, on: bool) -> None:
        for layer in self.layers:
            layer.moe.quantise.fill_(float(on))  # type: ignore[union-attr]

    def forward(self, ids: Tensor, masks: tuple[object, object]) -> tuple[Tensor, Tensor, Tensor]:
        """ids [batch, tokens] -> hidden [batch, tokens, hidden], balance, share [layers, experts]."""
        table = rope_table(self.shape, ids.device)
        x = self.embed(ids)
        balance, shares = x.new_zeros((), dtype=torch.float32), []
        for i, layer in enumerate(self.layers):
            x, b, share = layer(x, table, masks[i % 2])
            balance = balance + b / self.shape.layers
            shares.append(share)
        return self.norm(x), balance, torch.stack(shares)

    def loss(
        self, ids: Tensor, targets: Tensor, masks: tuple[object, object]
    ) -> tuple[Tensor, ...]:
        """Cross-entropy in nats a token, the balance loss, and the share of each expert."""
        hidden, balance, share = self(ids, masks)
        logits = F.linear(hidden, self.embed.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), balance, share
