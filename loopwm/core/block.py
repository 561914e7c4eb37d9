"""Pre-norm transformer layer. Attention is an argument, so the layer is independent of caches and backends.

Shape suffixes: B batch, L query positions, S key positions, P those of a shared prefix, N = B * L, D width, H heads,
G heads of keys and values, each shared by H / G heads of queries (grouped-query attention, Ainslie et al. 2023), E
width of one head.

Departures from the textbook: RMSNorm, rotary positions over half-split pairs, RMSNorm on queries and keys, a
squared-ReLU MLP, no biases, output projections that start at zero so that a fresh layer is the identity. Layers of
adopted decoders may have a SwiGLU MLP, and queries and keys without norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loopwm.runtime import quick_products


class Attend(Protocol):
    """Attention of one slot: caching, masks and backends are up to the implementation."""

    def __call__(self, slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Return attention (B, L, H * E) of q (B, H, L, E) over k and v (B, G, L, E).

        `mask` is specific to the implementation.
        """


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs that all layers of a pass share: rotary angles (B or 1, 1, L, E) and the mask.

    The core passes the mask to `attend` and selects rows of it by `mask[rows]`; nothing else.
    """

    cos: Tensor
    sin: Tensor
    mask: Any = None

    def select(self, rows: Tensor) -> AttentionInputs:
        """Select rows of the batch. Parts shared by the whole batch (first size 1) stay unchanged."""
        mask = None if self.mask is None else self.mask[rows]
        cos, sin = (x if x.shape[0] == 1 else x[rows] for x in (self.cos, self.sin))
        return AttentionInputs(cos, sin, mask)


def rotary_angles(
    positions_BL: Tensor, head_dim: int, theta: float, scaled: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin for `rotate`, (B, 1, L, E) float32 each, pairs (i, i + E/2) by falling frequency.

    scaled: frequency of each pair, in place of the powers of `theta`.
    """
    steps = torch.arange(0, head_dim, 2, device=positions_BL.device, dtype=torch.float32)
    frequencies = theta ** (-steps / head_dim) if scaled is None else steps.new_tensor(scaled)
    angles = positions_BL[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x (B, H, L, E), so that scores depend on position differences only."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + swapped * sin.to(x.dtype)


def for_queries(x_BGSE: Tensor, heads: int) -> Tensor:
    """Repeat keys or values (B, G, S, E) for the heads that share them, (B, heads, S, E).

    Source: Ainslie et al. 2023.
    """
    groups = x_BGSE.shape[1]
    if groups == heads:
        return x_BGSE
    return x_BGSE[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)


def causal_attention(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend without a cache, the same in every slot. mask: (B, 1, L, L) bool or additive, None for causal."""
    k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix_k: Tensor, prefix_v: Tensor
) -> Tensor:
    """Attend over a shared prefix and each row's own columns; the prefix is read once for all rows.

    Args:
        q: (B, H, L, E).
        k: own keys (B, G, S, E), the last L of the queries.
        v: own values, as `k`.
        mask: (B, 1, L, S) bool over own columns, None for causal.
        prefix_k: (1, G, P, E), visible to every query.
        prefix_v: as `prefix_k`.

    Returns:
        (B, L, H * E).
    """
    (rows, heads, length, width), groups, shared = q.shape, k.shape[1], prefix_k.shape[2]

    def by_group(x_BGNi: Tensor) -> Tensor:
        return x_BGNi.transpose(0, 1).flatten(1, 2)

    # Fold the query heads that share a key head into the query dimension: n runs over heads and columns.
    q_BGnE = (q * width**-0.5).reshape(rows, groups, -1, width)
    # Two products instead of one over repeated keys: the prefix is stored and read once for all rows.
    own_BGnS = q_BGnE @ k.mT
    if length > 1 or mask is not None:
        own_BGnS = _hide(own_BGnS.unflatten(2, (-1, length)), mask).flatten(2, 3)
    with quick_products(rows * length):
        shared_GNP = by_group(q_BGnE) @ prefix_k[0].mT
    # One softmax over prefix and own columns; its kernels accumulate half precision in float32.
    scores_GNK = torch.cat((shared_GNP, by_group(own_BGnS)), -1)
    weights_GNK = scores_GNK.softmax(-1)
    with quick_products(rows * length):
        shared_GNE = weights_GNK[..., :shared] @ prefix_v[0]
    own_BGnK = weights_GNK[..., shared:].unflatten(1, (rows, -1)).transpose(0, 1)
    out_BGnE = own_BGnK @ v + shared_GNE.unflatten(1, (rows, -1)).transpose(0, 1)
    return out_BGnE.reshape(rows, heads, length, width).transpose(1, 2).flatten(2)


def _hide(scores_BGRLS: Tensor, mask: Tensor | None) -> Tensor:
    """Mask scores by `mask` (B, 1, L, S), None for causal."""
    if mask is None:
        length, columns = scores_BGRLS.shape[-2:]
        # The queries are the last `length` columns, so the diagonal is shifted to the right.
        visible = torch.ones(length, columns, dtype=torch.bool, device=scores_BGRLS.device).tril(columns - length)
    else:
        visible = mask[:, :, None]
    return scores_BGRLS.masked_fill(~visible, -math.inf)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, which is float32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, eps: float, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()

    def project(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, L, E), keys and values (B, G, L, E)."""
        q = rotate(self.q_norm(split_heads(self.q_proj(x_BLD), self.head_dim)), cos, sin)
        k = rotate(self.k_norm(split_heads(self.k_proj(x_BLD), self.head_dim)), cos, sin)
        v = split_heads(self.v_proj(x_BLD), self.head_dim)
        # Norms and rotation may have promoted q and k to float32 under autocast; kernels need one dtype.
        return q.to(v.dtype), k.to(v.dtype), v


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape (B, L, H * E) to (B, H, L, E)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, swiglu: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False) if swiglu else None
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return self.down_proj(F.relu(self.up_proj(x_BLD)).square())


class Block(nn.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); x: (B, L, D). The layer of Parcae, table 18.

    sandwich: normalise the outputs of attention and MLP before they are added. qk_norm: normalise queries and keys.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, mlp_dim: int, eps: float, sandwich: bool = False,
        qk_norm: bool = True, swiglu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=eps)
        self.attention = Attention(dim, heads, kv_heads, head_dim, eps, qk_norm)
        self.mlp_norm = RMSNorm(dim, eps=eps)
        self.mlp = MLP(dim, mlp_dim, swiglu)
        self.attention_out_norm = RMSNorm(dim, eps=eps) if sandwich else nn.Identity()
        self.mlp_out_norm = RMSNorm(dim, eps=eps) if sandwich else nn.Identity()
        self.before, self.after = before_attention, after_attention
        self.checkpointing = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw matrices with variance 1 / fan-in and zero the two output projections.

        A fresh layer is then the identity.
        """
        # The variance 1 / fan-in keeps activations at unit scale.
        attention, mlp = self.attention, self.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.up_proj, mlp.gate_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for linear, norm in ((attention.o_proj, self.attention_out_norm), (mlp.down_proj, self.mlp_out_norm)):
            if isinstance(norm, RMSNorm):
                # A norm of a zero projection has no useful gradient, so the norm's weight starts at zero instead.
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                nn.init.zeros_(norm.weight)
            else:
                nn.init.zeros_(linear.weight)
        for norm in (self.attention_norm, self.mlp_norm, attention.q_norm, attention.k_norm):
            if isinstance(norm, RMSNorm):
                nn.init.ones_(norm.weight)

    def forward(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend, slot: int) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            # Layers draw no random numbers, so their state needs no saving.
            layer: Tensor = checkpoint(
                self._forward, x_BLD, shared, attend, slot, use_reentrant=False, preserve_rng_state=False
            )
            return layer
        return self._forward(x_BLD, shared, attend, slot)

    def _forward(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend, slot: int) -> Tensor:
        q, k, v = self.before(self, x_BLD, shared.cos, shared.sin)
        return self.after(self, x_BLD, attend(slot, q, k, v, shared.mask))


def before_attention(block: Block, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return block.attention.project(block.attention_norm(x_BLD), cos, sin)


def after_attention(block: Block, x_BLD: Tensor, attended: Tensor) -> Tensor:
    x_BLD = x_BLD + block.attention_out_norm(block.attention.o_proj(attended))
    return x_BLD + block.mlp_out_norm(block.mlp(block.mlp_norm(x_BLD)))


RECOMPILED = 32
"""Kernels of a compiled function: for one row and several, with gradients and without, in both precisions. PyTorch's
limit of 8, which dev batches reach, would leave later shapes uncompiled."""


def compile_blocks(model: nn.Module, dynamic: bool) -> None:
    """Compile everything in a model's layers except attention with Inductor, once for all layers.

    Needs a C++ compiler on CPU. The first forward and backward pass take half a minute longer. dynamic: one kernel for
    all shapes of a batch; otherwise one a shape, which is faster where few occur.
    """
    torch._dynamo.config.recompile_limit = RECOMPILED
    before = torch.compile(before_attention, dynamic=dynamic)
    after = torch.compile(after_attention, dynamic=dynamic)
    for module in model.modules():
        if isinstance(module, Block):
            # One compiled function for all layers: a graph per layer would recompile for each.
            module.before, module.after = before, after


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute activations of a model's layers in the backward pass, so that only their inputs are stored.

    `small` stores 54 instead of 517 MiB for 1,024 tokens. `attend` must be pure: it runs twice.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.checkpointing = True
