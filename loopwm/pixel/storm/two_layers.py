"""Two-layer transformer, the sequence model of STORM's authors, for comparison with the looped core.

Shape suffixes: B batch, T environment steps, P past steps, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import ExitRule, Fixed
from loopwm.pixel.dynamics import NO_EPISODE, Depth, DynamicsOutput, episodes_of

LAYERS = 2
DROPOUT = 0.1


@dataclass(frozen=True)
class Past:
    """Past inputs x (B, P, D) and the per-row episode number of each, (B, P)."""

    x: Tensor
    episodes: Tensor

    def select(self, rows: Tensor) -> Past:
        """Select rows, int64 (n,); repeats are allowed."""
        return Past(self.x[rows], self.episodes[rows])

    def join(self, other: Past) -> Past:
        """Concatenate pasts along the batch; left-pad the shorter with masked steps."""
        steps = max(self.x.shape[1], other.x.shape[1])
        both = [(part, steps - part.x.shape[1]) for part in (self, other)]
        x = torch.cat([F.pad(part.x, (0, 0, missing, 0)) for part, missing in both])
        return Past(x, torch.cat([F.pad(part.episodes, (missing, 0), value=NO_EPISODE) for part, missing in both]))


class TwoLayers(nn.Module):
    """Post-norm layers with dropout (STORM, tables 6 and 7), interchangeable with `LoopedAttention`.

    There is no KV cache: each call runs all past steps again.
    """

    def __init__(self, dim: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, heads, mlp_dim, dropout=DROPOUT, batch_first=True)
        self.two_layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.heads, self.dim = heads, dim

    def check(self, depth: int | ExitRule) -> ExitRule:
        """Accept any depth, since nothing loops."""
        return Fixed(1)

    def initial(self, batch: int, device: torch.device) -> Past:
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return Past(torch.zeros(batch, 0, self.dim, device=device), empty)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Past | None = None
    ) -> DynamicsOutput[Past]:
        """Run T steps of one-slot frames, x (B, T, 1, D); see `Dynamics`. Positions are already added to x."""
        before = self.initial(len(x), x.device) if state is None else state
        past = Past(torch.cat((before.x, x[:, :, 0]), 1), episodes_of(first, before.episodes))
        steps = past.x.shape[1]
        # nn.TransformerEncoder hides where the mask is True, unlike scaled_dot_product_attention.
        later = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
        hidden = later | (past.episodes[:, :, None] != past.episodes[:, None])
        h = self.two_layers(past.x, mask=hidden.repeat_interleave(self.heads, 0))[:, -x.shape[1] :]
        return DynamicsOutput(h[:, :, None], past, torch.ones_like(first, dtype=torch.long))
