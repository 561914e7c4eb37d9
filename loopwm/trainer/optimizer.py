"""Optimisers, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from loopwm.trainer.config import OptimizerConfig
from loopwm.trainer.muon import Muon

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


def learning_rate_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the factor of a linear warm-up, a plateau and a linear decay to zero.

    The decay takes the last `decay_share` of the steps.
    """
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    decay_steps = max(1, round(steps * config.decay_share))
    return warm * min(1.0, (steps - step) / decay_steps)


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
