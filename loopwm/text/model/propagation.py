"""`propagate: latent`: the slots of a step receive the latent of the step before, h_{k-1}.

The slots of step k need h_{k-1}, so a training row of K horizons is K + 1 passes: stage 0 holds the trunk and the slots
of h_0, stage k the action, the slots and the side branches of horizon k (`loopwm/text/data/tree.py:by_stage`).
Stages share keys and values, with their gradients, and the depth of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from loopwm.core.depth import DepthPlan
from loopwm.core.kv_cache import KVCache
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree_attention import TreeMask
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.heads import unit

Output = TypeVar("Output", bound=ModelOutput)


class Propagation(nn.Linear):
    """Project h_{k-1} for the slots of step k: the latent part of [h_{k-1}; e_k; u_k] (LoopWM, equation 4).

    Starts at zero, so that a fresh model equals the one without it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, h: Tensor) -> Tensor:
        """Map (..., D) to (..., D); zeros stay zeros."""
        return super().forward(unit(h))


@dataclass(frozen=True)
class Carried:
    """Inputs of a pass from the step before; used with `propagate: latent` only.

    latent: (B, L, D) h_{k-1} at the slots, zeros elsewhere. initial: (B, L, D) h^(0), None for the default.
    """

    latent: Tensor
    initial: Tensor | None


def run_stages(
    model: Callable[..., Output], config: LoopWMConfig, batch: TreeBatch, mask: TreeMask, depth: DepthPlan | int
) -> list[Output]:
    """Run the stages of a batch and return their outputs.

    Raises ValueError for a batch that is not laid out `by_stage`.
    """
    if len(batch.stage_ends) != 1 + int(batch.stage.max()):
        raise ValueError("batch: must be laid out by_stage for propagate: latent, got the layout for one pass")
    cache = KVCache(0, batch.tokens.device)  # no rows: masks and positions are the batch's
    # h^(0) of all columns, so that a stage starts from the noise from which one pass over them would.
    if isinstance(depth, DepthPlan):
        first = depth.initial_state(batch.tokens.shape[1], config.hidden_size, batch.tokens.device)
    else:
        first = torch.zeros(*batch.tokens.shape, config.hidden_size, device=batch.tokens.device)
    outs: list[Output] = []
    start = 0
    for stage, end in enumerate(batch.stage_ends):
        columns = slice(start, end)
        out = model(
            batch.tokens[:, columns],
            mask.stage(start, end),
            batch.positions[:, columns],
            past_key_values=cache,
            use_cache=False,
            depth=depth,
            carried=_carried(batch, stage, outs, first[:, columns]),
        )
        outs.append(out)
        start = end
    return outs


def _carried(batch: TreeBatch, stage: int, outs: Sequence[ModelOutput], first_BLD: Tensor) -> Carried:
    """Collect the latents that this stage's slots take from the stage before; `first_BLD` is h^(0) of all columns."""
    latent = torch.zeros_like(first_BLD)
    if stage == 0:
        return Carried(latent, first_BLD)
    steps, starts = batch.steps, (0, *batch.stage_ends)
    here = (steps.horizon == stage).nonzero()[:, 0]
    row, column = steps.row[here, None], steps.columns[here] - starts[stage]
    source = steps.columns[here - 1] - starts[stage - 1]  # a step follows its predecessor in `steps`
    # Out of place, so that gradients flow from this stage to the last one.
    latent = latent.index_put((row, column), outs[-1]["latent"][row, source].float())
    return Carried(latent, first_BLD)
