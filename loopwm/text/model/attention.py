"""Attention slots of the text model, and copy attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from loopwm.core.block import Attend, AttentionInputs, RMSNorm, for_queries, rotate, split_heads
from loopwm.core.kv_cache import KVCache
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.heads import unit


class AttentionSlot(nn.Module):
    """Weightless module for one attention call of the deepest pass; caches index it by `layer_idx`."""

    def __init__(self, config: LoopWMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True  # read by attention backends of transformers
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // (config.num_key_value_heads or 1)
        self.scaling = config.head_dim**-0.5

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cache: Cache | KVCache | None, **kwargs: Any
    ) -> Tensor:
        """Attend with q (B, H, L, E), k and v (B, G, L, E). Returns (B, L, H * E)."""
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # Exactly one call of the attention interface per slot: vLLM maps each to a layer of its cache.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_attention)
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        # Backends return (B, L, H, E) or, over packed sequences, (L, H * E).
        return out.reshape(q.shape[0], q.shape[2], -1)


def _eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)  # half precision loses small weights
    return (weights @ v).transpose(1, 2), weights


class CopyAttention(nn.Module):
    """Copy input embeddings by attention (a pointer network in the form of attention).

    Returns sigmoid(gate) * scale * attention(values = token embeddings): (B, L, D). With grouped keys and values a
    value is narrower than an embedding: `pack` projects it, orthogonally at first, and `unpack` projects the heads
    back.
    """

    def __init__(self, config: LoopWMConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        shared = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
        self.k_proj = nn.Linear(dim, shared, bias=False)
        narrow = shared < dim
        self.pack = nn.Linear(dim, shared, bias=False) if narrow else None
        self.unpack = nn.Linear(dim, dim, bias=False) if narrow else None
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.gate = nn.Linear(dim, 1)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.q_proj, self.k_proj, self.gate):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.gate.bias)
        nn.init.constant_(self.scale, COPY_SCALE)
        for norm in (self.q_norm, self.k_norm):
            nn.init.ones_(norm.weight)
        if self.pack is not None and self.unpack is not None:
            # Orthogonal, with the transpose behind it: keeps the embedding's own direction before training.
            nn.init.orthogonal_(self.pack.weight)
            heads = self.unpack.in_features // self.head_dim
            back_1HDE = for_queries(split_heads(self.pack.weight.T[None], self.head_dim), heads)
            with torch.no_grad():
                self.unpack.weight.copy_(back_1HDE[0].transpose(0, 1).flatten(1))

    def forward(self, h_BLD: Tensor, tokens_BLD: Tensor, shared: AttentionInputs, attend: Attend, slot: int) -> Tensor:
        q = rotate(self.q_norm(split_heads(self.q_proj(h_BLD), self.head_dim)), shared.cos, shared.sin)
        k = rotate(self.k_norm(split_heads(self.k_proj(h_BLD), self.head_dim)), shared.cos, shared.sin)
        v = split_heads(tokens_BLD if self.pack is None else self.pack(tokens_BLD), self.head_dim)
        copied = attend(slot, q.to(v.dtype), k.to(v.dtype), v, shared.mask)
        if self.unpack is not None:
            copied = self.unpack(copied)
        return self.gate(h_BLD).sigmoid() * self.scale * copied


COPY_SCALE = 8.0
"""Initial scale of copied embeddings: large enough for a copied token to win, small enough to start harmless."""


class RewardAttention(nn.Module):
    """Attend from a slot to all that was read, for the heads of rewards and ends.

    What decides a reward stands far back: the goal, and what was done. Only these heads read what is found, so it can
    be fitted to a finished model without changing its texts. Ours, not the paper's.
    """

    def __init__(self, config: LoopWMConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.hidden_size, config.head_dim
        queried = config.num_attention_heads * config.head_dim
        shared = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
        self.q_proj = nn.Linear(dim, queried, bias=False)
        self.k_proj = nn.Linear(2 * dim, shared, bias=False)
        self.v_proj = nn.Linear(2 * dim, shared, bias=False)
        self.o_proj = nn.Linear(queried, dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.o_proj.weight)
        for norm in (self.q_norm, self.k_norm):
            nn.init.constant_(norm.weight, SHARP)

    def forward(self, h_BLD: Tensor, state_BLD: Tensor, shared: AttentionInputs, attend: Attend, slot: int) -> Tensor:
        """Return h, of unit size, and what was found for it, (B, L, D). state: h^(T)."""
        q = self.queries(h_BLD, shared.cos, shared.sin)
        k, v = self.keys_values(h_BLD, state_BLD, shared)
        return self.with_context(h_BLD, attend(slot, q.to(v.dtype), k.to(v.dtype), v, shared.mask))

    def queries(self, h_BLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return (B, H, L, E)."""
        return rotate(self.q_norm(split_heads(self.q_proj(unit(h_BLD)), self.head_dim)), cos, sin)

    def keys_values(self, h_BLD: Tensor, state_BLD: Tensor, shared: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return those of each position, (B, G, L, E)."""
        both = torch.cat([unit(state_BLD).to(h_BLD.dtype), unit(h_BLD)], -1)
        k = self.k_norm(split_heads(self.k_proj(both), self.head_dim))
        return rotate(k, shared.cos, shared.sin), split_heads(self.v_proj(both), self.head_dim)

    def with_context(self, h_BLD: Tensor, context_BLF: Tensor) -> Tensor:
        """Return (B, L, D). context: attended values, heads side by side, F = H E."""
        return unit(h_BLD) + self.o_proj(context_BLF)


SHARP = 1.5
"""Initial size of normed queries and keys: attention to single tokens, such as the goal's, is learnt sooner."""
