"""The training objective of text worlds: each part returns (loss, diagnostics)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import DepthPlan
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.tree import IGNORED, TreeBatch

MAX_HORIZON = 16
"""Longest deferral whose loss is reported on its own."""


def observation_loss(
    logits_NV: Tensor, target_N: Tensor, horizon_N: Tensor, normaliser: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of observation tokens (LoopWM, world model loss: l_obs), summed and divided by `normaliser`.

    Diagnostics, each (MAX_HORIZON + 1,) by horizon with the trunk at 0: summed loss in nats, targets, right tokens.
    """
    loss_N = F.cross_entropy(logits_NV.float(), target_N, reduction="none")
    right_N = (logits_NV.argmax(-1) == target_N).float()

    def by_horizon(values: Tensor) -> Tensor:
        return torch.zeros(MAX_HORIZON + 1, device=values.device).index_add(0, horizon_N, values.detach())

    sums = {"loss": by_horizon(loss_N), "targets": by_horizon(torch.ones_like(loss_N)), "right": by_horizon(right_N)}
    return loss_N.sum() / normaliser, sums


class TextObjective(nn.Module):
    """A model with its loss, in one module so that data parallel wrappers see one forward."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TreeBatch, depth: DepthPlan | int, normaliser: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch; `normaliser` is the number of targets of the whole global batch.

        Diagnostics: `observation_loss`'s, and state_rms and last_step_rms of the recurrence.
        """
        out = self.model.model(
            batch.tokens,
            attention_mask=batch.attention_mask(),
            position_ids=batch.positions,
            use_cache=False,
            depth=depth,
        )
        wanted = batch.label != IGNORED
        logits = self.model.lm_head(out.last_hidden_state[wanted])
        loss, diagnostics = observation_loss(logits, batch.label[wanted], batch.horizon[wanted], normaliser)
        real = batch.branch >= 0
        state, previous = out.state.detach()[real], out.previous_state.detach()[real]
        diagnostics["state_rms"] = state.square().mean().sqrt()
        diagnostics["last_step_rms"] = (state - previous).square().mean().sqrt()
        return loss, diagnostics
