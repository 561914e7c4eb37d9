"""Attention of whole rows with gradients, for training.

Shape suffixes as in `loopwm.core.block`; R = H / G heads of queries that share keys and values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from loopwm.core.block import for_queries

QUERY_BLOCK = 256
"""Queries that look at their keys together."""


def training_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attention of whole rows, with gradients: (B, H, L, E). seen: (L, S) bool, who sees whom; None: plainly causal.

    In bfloat16 on a processor, two plain products and a softmax for every block of queries take half of the fused
    kernel's time or less (lab/benchmarks/training_attention.py), whose own products are slower. In float32 and
    elsewhere the kernel is the faster one. Every query must see a key.
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        out: Tensor = _Blockwise.apply(q, k, v, seen)
        return out
    k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)


class _Blockwise(Function):
    """Block after block of queries, whose weights are kept for the way back.

    By hand, since autograd would mask gradients that are zero anyway, and send back one of all keys for every block.
    """

    @staticmethod
    def forward(ctx: Any, q_BHLE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, seen: Tensor | None) -> Tensor:
        q_BGRLE = (q_BHLE * q_BHLE.shape[-1] ** -0.5).unflatten(1, (k_BGSE.shape[1], -1))
        out_BGRLE, weights = torch.empty_like(q_BGRLE), []
        for start, end, keys in _blocks(q_BGRLE.shape[3], None if seen is None else seen.shape[1]):
            hidden = _after(start, end, q_BHLE.device) if seen is None else ~seen[start:end]
            block = q_BGRLE[..., start:end, :]
            scores = block.flatten(2, 3) @ k_BGSE[:, :, :keys].mT
            scores.view(*block.shape[:-1], keys).masked_fill_(hidden, -math.inf)
            weights.append(scores.softmax(-1))
            out_BGRLE[..., start:end, :] = (weights[-1] @ v_BGSE[:, :, :keys]).view(block.shape)
        ctx.save_for_backward(q_BGRLE, k_BGSE, v_BGSE, *weights)
        return out_BGRLE.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BHLE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BGRLE, k_BGSE, v_BGSE, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_BGRLE, grad_q = grad_BHLE.unflatten(1, q_BGRLE.shape[1:3]), torch.empty_like(q_BGRLE)
        grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k_BGSE, v_BGSE))
        start = 0
        for weight in weights:
            keys, end = weight.shape[-1], start + weight.shape[2] // q_BGRLE.shape[2]
            q, grad = (x[..., start:end, :].flatten(2, 3) for x in (q_BGRLE, grad_BGRLE))
            grad_v[:, :, :keys] += weight.mT @ grad
            slope = torch._softmax_backward_data(grad @ v_BGSE[:, :, :keys].mT, weight, -1, weight.dtype)
            grad_k[:, :, :keys] += slope.mT @ q
            grad_q[..., start:end, :] = (slope @ k_BGSE[:, :, :keys]).view(grad_q[..., start:end, :].shape)
            start = end
        scale = q_BGRLE.shape[-1] ** -0.5
        return (grad_q * scale).flatten(1, 2), grad_k.to(k_BGSE.dtype), grad_v.to(v_BGSE.dtype), None


def _blocks(length: int, keys: int | None) -> list[tuple[int, int, int]]:
    """Start and end of blocks of queries, and how many keys they look at: all, or without `keys` those before them."""
    starts = range(0, length, QUERY_BLOCK)
    ends = [min(length, start + QUERY_BLOCK) for start in starts]
    return [(start, end, keys or end) for start, end in zip(starts, ends, strict=True)]


def _after(start: int, end: int, device: torch.device) -> Tensor:
    """(end - start, end) bool: the keys that come after each of these queries."""
    return torch.ones(end - start, end, dtype=torch.bool, device=device).triu(start + 1)
