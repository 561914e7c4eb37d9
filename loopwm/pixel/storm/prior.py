"""Prior of the next latents given h: independent groups, as published, or autoregressive groups.

Groups that encode the same random event, such as the ball's direction, must agree; independent groups cannot.

Shape suffixes: G groups, K classes of a group, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Factorised(nn.Linear):
    """Linear logits of h, independent for each group (STORM, table 8)."""

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__(dim, groups * classes)
        self.groups, self.classes = groups, classes
        self.turns = (slice(0, groups),)

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """Return logits (..., G, K) from h (..., D); z is ignored."""
        return self(h).unflatten(-1, (self.groups, self.classes))


class Autoregressive(nn.Module):
    """Autoregressive p(z | h), the product of p(z_g | z_1 .. z_{g-1}, h) (NADE, Larochelle and Murray 2011).

    Groups share their hidden units except for the sum of the contributions of earlier groups, so one pass computes all.
    """

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__()
        self.turns = tuple(slice(g, g + 1) for g in range(groups))
        width = 4 * dim
        self.hidden = nn.Linear(dim, width)
        self.told = nn.Parameter(torch.randn(groups, classes, width) * width**-0.5)
        self.out = nn.Parameter(torch.randn(groups, width, classes) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(groups, classes))

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """Return logits (..., G, K) from h (..., D) and one-hot z (..., G, K); a group depends on those before it."""
        contribution = torch.einsum("...gk,gkd->...gd", z, self.told)  # one-hot: the row of its class
        # Shift by one group: a group must not condition on itself.
        before = nn.functional.pad(contribution.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        units = nn.functional.silu(self.hidden(h)[..., None, :] + before)
        return torch.einsum("...gd,gdk->...gk", units, self.out) + self.bias


PRIORS: dict[str, type[Factorised] | type[Autoregressive]] = {
    "factorised": Factorised,
    "autoregressive": Autoregressive,
}
"""Priors with `logits`, and `turns`: slices of the groups that are sampled one after another."""
