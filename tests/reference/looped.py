"""The looped core written out a second time: one row at a time, one position at a time, no cache, no batching.

Takes the weights of a `LoopedCore` by name and shares no code with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loopwm.core.looped import CoreConfig

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / ((x * x).mean() + eps).sqrt()


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head vector (E,)."""
    half = len(x) // 2
    out = [None] * len(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return torch.stack(out)


def attention(w: Weights, prefix: str, xs: list[Tensor], c: CoreConfig, theta: float) -> list[Tensor]:
    """Causal attention over the row's vectors (D,), head by head and query by query."""

    def heads(x: Tensor, name: str) -> list[Tensor]:
        return list((w[f"{prefix}{name}.weight"] @ x).split(c.head_dim))

    outs = []
    for i, x in enumerate(xs):
        mixed = []
        for h in range(c.heads):
            q = rotate(rms_norm(heads(x, "q_proj")[h], w[f"{prefix}q_norm.weight"], c.norm_eps), i, theta)
            scores, values = [], []
            for j in range(i + 1):
                k = rms_norm(heads(xs[j], "k_proj")[h], w[f"{prefix}k_norm.weight"], c.norm_eps)
                scores.append(q @ rotate(k, j, theta) / math.sqrt(c.head_dim))
                values.append(heads(xs[j], "v_proj")[h])
            mixed.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        outs.append(w[f"{prefix}o_proj.weight"] @ torch.cat(mixed))
    return outs


def layer(w: Weights, prefix: str, xs: list[Tensor], c: CoreConfig, theta: float) -> list[Tensor]:
    def added(x: Tensor, name: str) -> Tensor:
        weight = w.get(f"{prefix}{name}.weight")
        return x if weight is None else rms_norm(x, weight, c.norm_eps)

    normed = [rms_norm(x, w[f"{prefix}attention_norm.weight"], c.norm_eps) for x in xs]
    mixed = attention(w, f"{prefix}attention.", normed, c, theta)
    xs = [x + added(m, "attention_out_norm") for x, m in zip(xs, mixed, strict=True)]
    out = []
    for x in xs:
        hidden = w[f"{prefix}mlp.up_proj.weight"] @ rms_norm(x, w[f"{prefix}mlp_norm.weight"], c.norm_eps)
        rectified = torch.where(hidden > 0, hidden * hidden, 0 * hidden)
        out.append(x + added(w[f"{prefix}mlp.down_proj.weight"] @ rectified, "mlp_out_norm"))
    return out


def row_forward(
    w: Weights, c: CoreConfig, x_LD: Tensor, h0_LD: Tensor, loops: int, mu_bwd: int, theta: float
) -> Tensor:
    """coda(C h^(T)) of one row (L, D); gradients flow through the last min(loops, mu_bwd) loops only."""
    xs = list(x_LD)
    for i in range(c.prelude_layers):
        xs = layer(w, f"prelude.{i}.", xs, c, theta)
    e = [rms_norm(x, w["input_norm.weight"], c.norm_eps) for x in xs]
    dt = torch.log(1 + torch.exp(w["injection.b"]))
    a_bar = torch.exp(-dt * torch.exp(w["injection.a"]))
    hs = list(h0_LD)
    for t in range(loops):
        if t <= loops - mu_bwd:
            hs = [h.detach() for h in hs]
        hs = [a_bar * h + dt * (w["injection.B.weight"] @ v) for h, v in zip(hs, e, strict=True)]
        for i in range(c.block_layers):
            hs = layer(w, f"block.{i}.", hs, c, theta)
        if c.state_norm:
            hs = [rms_norm(h, w["state_norm.weight"], c.norm_eps) for h in hs]
    out = [w["C.weight"] @ h for h in hs]
    for i in range(c.coda_layers):
        out = layer(w, f"coda.{i}.", out, c, theta)
    return torch.stack(out)
