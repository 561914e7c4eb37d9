"""Muon with float32 products on CPU.

torch's own orthogonalises in bfloat16 everywhere. On a processor without bfloat16 products that takes several times as
long as the forward and backward passes of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loopwm.runtime import quick_products

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the odd quintic with the steepest slope at zero (Jordan et al. 2024, "Muon")."""

ITERATIONS = 5


class Muon(torch.optim.Muon):
    """torch.optim.Muon with `match_rms_adamw` and Nesterov momentum; products in float32 except on GPU."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closure: not supported")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"], group["weight_decay"])
        return None

    def _update(self, parameter: Tensor, rate: float, momentum: float, decay: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = orthogonal(gradient.lerp(buffer, momentum))
        parameter.mul_(1 - rate * decay)
        # Scale to the rms of an AdamW update of the same rate (Liu et al. 2025, "Muon is Scalable for LLM Training").
        parameter.add_(direction, alpha=-0.2 * math.sqrt(max(parameter.shape)) * rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return U S' V^T for a matrix U S V^T, with singular values S' between about 0.7 and 1.2, by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    with quick_products():
        for _ in range(ITERATIONS):
            gram = wide @ wide.T
            wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[0] <= x.shape[1] else wide.T
