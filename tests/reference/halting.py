"""A row that passes through the core piece by piece, each piece at a depth of its own: one vector at a time.

Keys and values are plain lists by (layer, loop), filled as the exit rules promise. Takes the weights of a
`LoopedCore` by name and shares no code with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from loopwm.core.looped import CoreConfig
from tests.reference.looped import Weights, rms_norm, rotate

Past = list[tuple[Tensor, Tensor]]
"""Keys and values of finished positions, each (H, E)."""


def layer(
    w: Weights, prefix: str, xs: list[Tensor], past: Past, c: CoreConfig, theta: float
) -> tuple[list[Tensor], Past]:
    """Outputs of new positions after `past`, and their own keys and values."""
    out: list[Tensor] = []
    own: Past = []
    for x in xs:
        position = len(past) + len(own)
        normed = rms_norm(x, w[f"{prefix}attention_norm.weight"], c.norm_eps)
        q, k, v = ((w[f"{prefix}attention.{n}_proj.weight"] @ normed).view(c.heads, c.head_dim) for n in "qkv")
        q, k = (
            torch.stack([rotate(rms_norm(head, w[f"{prefix}attention.{n}_norm.weight"], c.norm_eps), position, theta)
                         for head in side])
            for n, side in (("q", q), ("k", k))
        )  # fmt: skip
        own.append((k, v))
        seen = past + own
        mixed = []
        for h in range(c.heads):
            scores = torch.stack([q[h] @ key[h] / math.sqrt(c.head_dim) for key, _ in seen])
            mixed.append(scores.softmax(0) @ torch.stack([value[h] for _, value in seen]))
        x = x + w[f"{prefix}attention.o_proj.weight"] @ torch.cat(mixed)
        hidden = w[f"{prefix}mlp.up_proj.weight"] @ rms_norm(x, w[f"{prefix}mlp_norm.weight"], c.norm_eps)
        out.append(x + w[f"{prefix}mlp.down_proj.weight"] @ torch.where(hidden > 0, hidden * hidden, 0 * hidden))
    return out, own


def row_passes(
    w: Weights, c: CoreConfig, x_LD: Tensor, ends: Sequence[int], loops: Sequence[int], theta: float
) -> Tensor:
    """coda(C h^(T)) (L, D) of a row cut after `ends` into pieces, the i-th of which takes loops[i] loops.

    What a later piece sees of an earlier one in its loop t is t's own keys and values, or those of the earlier
    piece's last loop where that is less.
    """
    past: dict[tuple[str, int], Past] = defaultdict(list)
    dt = torch.log(1 + torch.exp(w["injection.b"]))
    a_bar = torch.exp(-dt * torch.exp(w["injection.a"]))
    outs = []
    for (start, end), depth in zip(pairwise((0, *ends)), loops, strict=True):
        xs = list(x_LD[start:end])
        for i in range(c.prelude_layers):
            xs, own = layer(w, f"prelude.{i}.", xs, past[f"prelude.{i}", 0], c, theta)
            past[f"prelude.{i}", 0] += own
        e = [rms_norm(x, w["input_norm.weight"], c.norm_eps) for x in xs]
        hs = [torch.zeros_like(x) for x in xs]
        fresh: dict[tuple[int, int], Past] = {}
        for t in range(depth):
            hs = [a_bar * h + dt * (w["injection.B.weight"] @ v) for h, v in zip(hs, e, strict=True)]
            for i in range(c.block_layers):
                hs, fresh[i, t] = layer(w, f"block.{i}.", hs, past[f"block.{i}", t], c, theta)
        for i in range(c.block_layers):
            for t in range(c.max_loops):
                past[f"block.{i}", t] += fresh[i, min(t, depth - 1)]
        xs = [w["C.weight"] @ h for h in hs]
        for i in range(c.coda_layers):
            xs, own = layer(w, f"coda.{i}.", xs, past[f"coda.{i}", 0], c, theta)
            past[f"coda.{i}", 0] += own
        outs += xs
    return torch.stack(outs)
