"""Training rows through the model: in one pass, or stage by stage where a latent is carried from step to step.

With `propagate: latent` the slots of step k need h_{k-1}, so a row of K horizons is K + 1 passes: stage 0 holds the
trunk and the slots of h_0, stage k the action, the slots and the side branches of horizon k. Stages share keys and
values, with their gradients, and the depth of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopwm.core import CoreState, DepthPlan
from loopwm.text.configuration import LoopWMConfig
from loopwm.text.modeling import Carried, LoopWMModel, LoopWMOutput
from loopwm.text.tree_attention import BranchMask, TreeMask
from loopwm.text.tree_batch import TreeBatch, branch_mask

COLUMNS = ("last_hidden_state", "latent", "state", "previous_state")


@dataclass(frozen=True)
class RowOutput:
    """Those parts of a `LoopWMOutput` that every column has, (B, L, D) each; and, of one pass only, what a gate is
    taught from (`CoreOutput`)."""

    last_hidden_state: Tensor
    latent: Tensor
    state: Tensor
    previous_state: Tensor
    carried: tuple[Tensor, ...] = ()
    gate_logits: Tensor | None = None

    @classmethod
    def of(cls, out: LoopWMOutput) -> RowOutput:
        columns = {name: out[name] for name in COLUMNS}
        return cls(**columns, carried=out.carried or (), gate_logits=out.gate_logits)

    @classmethod
    def join(cls, outs: Sequence[RowOutput]) -> RowOutput:
        columns: dict[str, Any] = {name: torch.cat([getattr(out, name) for out in outs], dim=1) for name in COLUMNS}
        return cls(**columns)


def row_mask(config: LoopWMConfig, batch: TreeBatch) -> TreeMask:
    """Who sees whom, by `decode_sees`."""
    return batch.attention_mask() if config.decode_sees == "all" else batch.state_mask()


def one_pass_mask(config: LoopWMConfig, batch: TreeBatch) -> BranchMask:
    """The same for a batch laid out for one pass, which computes what is seen alone."""
    return branch_mask(batch, row_mask(config, batch))


def run_rows(model: LoopWMModel, batch: TreeBatch, depth: DepthPlan | int) -> RowOutput:
    """Runs a batch as the model's configuration lets its columns see and carry.

    Raises ValueError if the model carries latents and the batch is not laid out `by_stage`.
    """
    if model.config.propagate == "none":
        mask = one_pass_mask(model.config, batch)
        return RowOutput.of(model(batch.tokens, mask, batch.positions, use_cache=False, depth=depth))
    if len(batch.stage_ends) != 1 + int(batch.stage.max()):
        raise ValueError("batch: laid out for one pass, propagate: latent needs the layout by_stage")
    stages = row_mask(model.config, batch)
    kept = CoreState(0, batch.tokens.device)
    first = _first_states(model, batch, depth)
    outs: list[RowOutput] = []
    start = 0
    for stage, end in enumerate(batch.stage_ends):
        columns = slice(start, end)
        out = model(
            batch.tokens[:, columns],
            stages.stage(start, end),
            batch.positions[:, columns],
            past_key_values=kept,
            use_cache=False,
            depth=depth,
            carried=_carried(model, batch, stage, outs, first[:, columns]),
        )
        outs.append(RowOutput.of(out))
        start = end
    return RowOutput.join(outs)


def _carried(model: LoopWMModel, batch: TreeBatch, stage: int, outs: Sequence[RowOutput], first_BLD: Tensor) -> Carried:
    """What the slots of this stage's columns take from the stage before; `first_BLD` is h^(0) of everything else.

    The state that starts the next step: LoopWM, section 3.2, cross-timestep state propagation.
    """
    latent = torch.zeros_like(first_BLD)
    if stage == 0:
        return Carried(latent, first_BLD)
    steps, starts = batch.steps, (0, *batch.stage_ends)
    here = (steps.horizon == stage).nonzero()[:, 0]
    row, column = steps.row[here, None], steps.columns[here] - starts[stage]
    source = steps.columns[here - 1] - starts[stage - 1]
    before = outs[-1]
    latent = latent.index_put((row, column), before.latent[row, source].float())
    if model.config.carry_state:
        first_BLD = first_BLD.index_put((row, column), before.state.detach()[row, source])
    return Carried(latent, first_BLD)


def _first_states(model: LoopWMModel, batch: TreeBatch, depth: DepthPlan | int) -> Tensor:
    """h^(0) of all columns (B, L, D): the noise one pass over them would start from."""
    rows, length = batch.tokens.shape
    dim, device = model.config.hidden_size, batch.tokens.device
    if isinstance(depth, DepthPlan):
        return depth.initial_state(length, dim, device)
    return torch.zeros(rows, length, dim, device=device)
