"""Optimisers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from loopwm.runtime import quick_products
from loopwm.trainer.config import OptimizerConfig

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the odd quintic with the steepest slope at zero (Jordan et al. 2024, "Muon")."""

ITERATIONS = 5


class Muon(torch.optim.Muon):
    """torch.optim.Muon with `match_rms_adamw` and Nesterov momentum; products in float32 except on GPU.

    torch's own orthogonalises in bfloat16 everywhere. On a processor without bfloat16 products that takes several times
    as long as the forward and backward passes of the whole model.
    """

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closure: not supported")
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault((parameter.shape, parameter.device), []).append(parameter)
            for (_, device), parameters in alike.items():
                # A GPU takes as long to start a product of small matrices as to compute it: one for all of a shape.
                count = len(parameters) if device.type == "cuda" else _processes()
                for first in range(0, len(parameters), count):
                    together = parameters[first : first + count]
                    self._update(together, group["lr"], group["momentum"], group["weight_decay"])
        return None

    def _update(self, parameters: list[Tensor], rate: float, momentum: float, decay: float) -> None:
        """Update parameters of one shape."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = shared_orthogonal(list(torch._foreach_lerp(gradients, buffers, momentum)))
        torch._foreach_mul_(parameters, 1 - rate * decay)
        # Scale to the rms of an AdamW update of the same rate (Liu et al. 2025, "Muon is Scalable for LLM Training").
        scale = -0.2 * math.sqrt(max(parameters[0].shape)) * rate
        torch._foreach_add_(parameters, [each.to(parameters[0].dtype) for each in directions], alpha=scale)


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shared_orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """Return `orthogonal` of matrices of one shape, of which each process computes its share.

    Source: Keller Jordan's distributed Muon, as in nanochat. Matrices sharded by FSDP are sharded again afterwards.
    """
    world, (first, *_) = _processes(), matrices
    if world == 1:
        return list(orthogonal(torch.stack(matrices)).unbind())
    whole = [matrix.full_tensor() if isinstance(matrix, DTensor) else matrix for matrix in matrices]
    share = math.ceil(len(whole) / world)
    computed_NRC = torch.zeros(share, *first.shape, dtype=torch.bfloat16 if first.is_cuda else torch.float32,
                               device=first.device)  # fmt: skip
    if mine := whole[dist.get_rank() * share :][:share]:
        computed_NRC[: len(mine)] = orthogonal(torch.stack(mine))
    shares = [torch.empty_like(computed_NRC) for _ in range(world)]
    dist.all_gather(shares, computed_NRC)
    directions = list(torch.cat(shares)[: len(whole)].unbind())
    if isinstance(first, DTensor):  # every process has the same directions, so none is sent
        return [distribute_tensor(each, first.device_mesh, first.placements, src_data_rank=None) for each in directions]
    return directions


def orthogonal(matrices: Tensor) -> Tensor:
    """Return U S' V^T for each matrix U S V^T, S' between about 0.7 and 1.2, by Newton-Schulz: (N, rows, columns)."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    with quick_products():
        for _ in range(ITERATIONS):
            gram = wide @ wide.mT
            wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[1] <= x.shape[2] else wide.mT


LAYERS = {"prelude", "block", "coda", "copy", "two_layers"}
"""Modules, of any system, whose matrices use Muon and decay. All others keep their size: embeddings, heads, the
monitor, the projection of the latent, the injection's B and C, and any matrix not listed.
"""


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """Build one optimiser, or Muon for the layers' matrices and AdamW for the rest.

    Only matrices inside `LAYERS` decay, not embeddings, heads or the injection's B and C (Parcae, table 20).
    """
    matrices, rest = split_parameters(model)
    undecayed = {"params": rest, "weight_decay": 0.0}
    if config.name == "adamw":
        return [_adamw([undecayed, {"params": matrices, "weight_decay": config.weight_decay}], config)]
    muon = Muon(matrices, config.learning_rate, config.momentum, config.weight_decay)
    return [muon, _adamw([undecayed], config)]


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> AdamW:
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-10)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices inside `LAYERS`, which Muon updates, and all other parameters, which AdamW updates."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        in_layers = not LAYERS.isdisjoint(name.split("."))
        (matrices if is_matrix and in_layers else rest).append(parameter)
    return matrices, rest


def learning_rate_factor(step: int, done: float, config: OptimizerConfig) -> float:
    """Return the factor of a linear warm-up, a plateau and a linear decay to zero.

    done: share of the run before this step. The decay takes the last `decay_share` of it.
    """
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return warm * min(1.0, (1 - done) / config.decay_share) if config.decay_share else warm
