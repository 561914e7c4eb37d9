"""The prior of the next latents given h: groups drawn apart, as STORM has them, or each given those drawn before it.

Groups that tell of the same chance event, where a ball went, must agree; drawn apart they each throw a coin of their
own. Shape suffixes: G groups, K classes of a group, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Factorised(nn.Linear):
    """Logits of a group are a linear function of h alone (STORM, table 8)."""

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__(dim, groups * classes)
        self.groups, self.classes = groups, classes
        self.turns = (slice(0, groups),)

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """(..., G, K) from h (..., D); z is not looked at."""
        return self(h).unflatten(-1, (self.groups, self.classes))


class Autoregressive(nn.Module):
    """p(z | h) as the product of p(z_g | z_1 .. z_{g-1}, h), whose hidden units are the same for all groups but for the
    sum of what the groups before tell them, so that all are computed at once (NADE, Larochelle and Murray 2011)."""

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__()
        self.turns = tuple(slice(g, g + 1) for g in range(groups))
        width = 4 * dim
        self.hidden = nn.Linear(dim, width)
        self.told = nn.Parameter(torch.randn(groups, classes, width) * width**-0.5)
        self.out = nn.Parameter(torch.randn(groups, width, classes) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(groups, classes))

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """(..., G, K) from h (..., D) and one-hot z (..., G, K), of which a group sees the groups before it."""
        told = torch.einsum("...gk,gkd->...gd", z, self.told)
        before = nn.functional.pad(told.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        units = nn.functional.silu(self.hidden(h)[..., None, :] + before)
        return torch.einsum("...gd,gdk->...gk", units, self.out) + self.bias


PRIORS: dict[str, type[Factorised] | type[Autoregressive]] = {
    "factorised": Factorised,
    "autoregressive": Autoregressive,
}
"""Each has `logits`, and `turns`: slices of the groups that are drawn one after another."""
