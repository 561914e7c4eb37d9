"""Forward pass of training rows: at once, or in stages with carried latents (`loopwm/text/model/propagation.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loopwm.core import DepthPlan
from loopwm.text.data.collate import TreeBatch, branch_mask
from loopwm.text.data.tree_attention import BranchMask, TreeMask
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMModel, LoopWMOutput
from loopwm.text.model.propagation import run_stages


class RowOutput(NamedTuple):
    """Per-column parts of a `LoopWMOutput`, (B, L, D) each."""

    last_hidden_state: Tensor
    latent: Tensor
    state: Tensor
    previous_state: Tensor

    @classmethod
    def of(cls, out: LoopWMOutput) -> RowOutput:
        return cls(*(out[name] for name in cls._fields))

    @classmethod
    def join(cls, outs: Sequence[RowOutput]) -> RowOutput:
        return cls(*(torch.cat(parts, dim=1) for parts in zip(*outs, strict=True)))


def row_mask(config: LoopWMConfig, batch: TreeBatch) -> TreeMask:
    """Return the attention mask by `decode_sees`."""
    return batch.attention_mask() if config.decode_sees == "all" else batch.state_mask()


def one_pass_mask(config: LoopWMConfig, batch: TreeBatch) -> BranchMask:
    """Return the mask of a batch laid out for one pass, which computes only visible columns."""
    return branch_mask(batch, row_mask(config, batch))


def run_rows(model: LoopWMModel, batch: TreeBatch, depth: DepthPlan | int) -> RowOutput:
    """Run a batch by the model's `decode_sees` and `propagate`.

    Raises ValueError if the model carries latents and the batch is not laid out `by_stage`.
    """
    if model.config.propagate == "none":
        mask = one_pass_mask(model.config, batch)
        return RowOutput.of(model(batch.tokens, mask, batch.positions, use_cache=False, depth=depth))
    outs = run_stages(model, model.config, batch, row_mask(model.config, batch), depth)
    return RowOutput.join([RowOutput.of(out) for out in outs])
