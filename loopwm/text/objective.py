"""The training objective of text worlds: each part returns (loss, diagnostics)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import DepthPlan
from loopwm.core.gate_loss import expected_exit_loss, gate_entropy_loss
from loopwm.text.modeling import LoopWMForCausalLM, LoopWMOutput
from loopwm.text.tree import IGNORED, TreeBatch, TreeMask

MAX_HORIZON = 16
"""Longest deferral whose loss is reported on its own."""

ExitLoss = Literal["none", "entropy", "expected"]
"""What teaches the exit gate while the model trains: nothing; the paper's regulariser; the expected loss over exits."""


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

    def __init__(self, model: LoopWMForCausalLM, exit_loss: ExitLoss = "none", exit_entropy_coef: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.exit_loss = exit_loss
        self.exit_entropy_coef = exit_entropy_coef

    def forward(self, batch: TreeBatch, depth: DepthPlan | int, normaliser: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch; `normaliser` is the number of targets of the whole global batch.

        Diagnostics: `observation_loss`'s, state_rms and last_step_rms of the recurrence, and, at sampled depth, those
        of the gate's loss.
        """
        mask = batch.attention_mask()
        out = self.model.model(
            batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False, depth=depth
        )
        wanted = batch.label != IGNORED
        logits = self.model.lm_head(out.last_hidden_state[wanted])
        loss, diagnostics = observation_loss(logits, batch.label[wanted], batch.horizon[wanted], normaliser)
        real = batch.branch >= 0
        if out.gate_logits is not None and self.exit_loss == "entropy":
            term, of_gate = gate_entropy_loss(out.gate_logits[real], self.exit_entropy_coef)
            loss, diagnostics = loss + term * batch.targets / normaliser, diagnostics | of_gate
        if out.gate_logits is not None and self.exit_loss == "expected":
            losses_NS = self._losses_by_exit(batch, mask, out, logits)
            expected, of_gate = expected_exit_loss(out.gate_logits[wanted], losses_NS, self.exit_entropy_coef)
            loss, diagnostics = expected * batch.targets / normaliser, diagnostics | of_gate
        state, previous = out.state.detach()[real], out.previous_state.detach()[real]
        diagnostics["state_rms"] = state.square().mean().sqrt()
        diagnostics["last_step_rms"] = (state - previous).square().mean().sqrt()
        return loss, diagnostics

    def _losses_by_exit(self, batch: TreeBatch, mask: TreeMask, out: LoopWMOutput, last_logits_NV: Tensor) -> Tensor:
        """Cross-entropy of the targets (N, S) had their rows left after each of the loops that carry gradients."""
        wanted = batch.label != IGNORED
        logits = []
        for state in (out.carried or ())[:-1]:
            hidden = self.model.model.read_out(state, batch.tokens, mask, batch.positions)
            logits.append(self.model.lm_head(hidden[wanted]))
        target_N = batch.label[wanted]
        losses = [F.cross_entropy(x.float(), target_N, reduction="none") for x in (*logits, last_logits_NV)]
        return torch.stack(losses, dim=-1)
