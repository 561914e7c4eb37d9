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
"""Queries whose scores are computed together; bounds the memory of the scores."""


def training_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend over whole rows, with gradients: (B, H, L, E).

    In bfloat16 on CPU, two plain products and a softmax per block of queries take at most half the time of the fused
    kernel, whose own products are slower (lab/benchmarks/training_attention.py). In float32 and on other devices the
    kernel is faster.

    Args:
        q: (B, H, L, E).
        k: (B, G, S, E).
        v: (B, G, S, E).
        visible: (L, S) bool, True where a query attends, at least one key each; None for causal.
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return _Blockwise.apply(q, k, v, visible)
    k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)


class _Blockwise(Function):
    """Attention block by block of queries; the weights are saved for the backward pass.

    Written by hand: autograd would mask gradients that are zero anyway, and return a gradient of all keys per block.
    """

    @staticmethod
    def forward(ctx: Any, q_BHLE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, visible: Tensor | None) -> Tensor:
        # Scale the queries: one product less than scaling all scores.
        q_BGRLE = (q_BHLE * q_BHLE.shape[-1] ** -0.5).unflatten(1, (k_BGSE.shape[1], -1))
        out_BGRLE, weights = torch.empty_like(q_BGRLE), []
        for start in range(0, q_BGRLE.shape[3], QUERY_BLOCK):
            block = q_BGRLE[..., start : start + QUERY_BLOCK, :]
            end = start + block.shape[3]
            seen = torch.ones(end - start, end, dtype=torch.bool).tril(start) if visible is None else visible[start:end]
            keys = seen.shape[1]
            scores = block.flatten(2, 3) @ k_BGSE[:, :, :keys].mT
            # A shared mask that is added takes a quarter of the time of one that is filled in.
            scores.view(*block.shape[:-1], keys).add_(scores.new_zeros(seen.shape).masked_fill_(~seen, -math.inf))
            weights.append(scores.softmax(-1))
            out_BGRLE[..., start:end, :] = (weights[-1] @ v_BGSE[:, :, :keys]).view(block.shape)
        ctx.save_for_backward(q_BGRLE, k_BGSE, v_BGSE, *weights)
        return out_BGRLE.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BHLE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BGRLE, k_BGSE, v_BGSE, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_BGRLE, grad_q = grad_BHLE.unflatten(1, q_BGRLE.shape[1:3]), torch.empty_like(q_BGRLE)
        # Sums in float32: bfloat16 would lose small contributions. Transposed, since products with weight.mT are slow.
        grad_k, grad_v = (torch.zeros_like(x.mT, dtype=torch.float32) for x in (k_BGSE, v_BGSE))
        start = 0
        for weight in weights:
            keys, end = weight.shape[-1], start + weight.shape[2] // q_BGRLE.shape[2]
            q, grad = (x[..., start:end, :].flatten(2, 3) for x in (q_BGRLE, grad_BGRLE))
            grad_v[..., :keys] += grad.mT @ weight
            slope = torch._softmax_backward_data(grad @ v_BGSE[:, :, :keys].mT, weight, -1, weight.dtype)
            grad_k[..., :keys] += q.mT @ slope
            grad_q[..., start:end, :] = (slope @ k_BGSE[:, :, :keys]).view(grad_q[..., start:end, :].shape)
            start = end
        scale = q_BGRLE.shape[-1] ** -0.5
        return (grad_q * scale).flatten(1, 2), grad_k.mT.to(k_BGSE.dtype), grad_v.mT.to(v_BGSE.dtype), None
