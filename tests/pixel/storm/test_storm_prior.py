"""Priors of STORM's latents: a distribution over all groups together, which is also what is drawn from."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from torch.nn import functional as F

from loopwm.pixel.storm.model import Storm, StormConfig, kl_divergence, sample_latents
from loopwm.records.frames import FrameSpace

Kind = Literal["factorised", "autoregressive"]
KINDS: tuple[Kind, ...] = ("factorised", "autoregressive")
GROUPS, CLASSES = 3, 2
TINY = StormConfig(groups=GROUPS, classes=CLASSES, image="small", stem=4, dim=16, heads=2, mlp_dim=32, uniform_mix=0.0)


def network(kind: Kind) -> Storm:
    torch.manual_seed(0)
    made = Storm(replace(TINY, prior=kind), FrameSpace("made/up", "1", (6, 5, 2), 3))
    for parameter in made.prior_head.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return made.eval()


ALL = F.one_hot(torch.tensor(list(product(range(CLASSES), repeat=GROUPS))), CLASSES).float()
"""Every z there is, (8, G, K)."""


def chances(made: Storm, h: torch.Tensor) -> torch.Tensor:
    """Of every z in `ALL`, as the product over groups, one z at a time."""
    return torch.stack([(made.prior(h, z[None])[0] * z).sum().exp() for z in ALL])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_latents_are_drawn_as_often_as_the_prior_says_of_all_groups_together(kind: Kind) -> None:
    made, h = network(kind), 0.3 * torch.randn(1, 16)
    likely = chances(made, h)
    assert likely.sum().item() == pytest.approx(1.0, abs=1e-5)
    drawn = made.expect(h.expand(20000, 16), sample_latents, torch.Generator().manual_seed(0))
    often = (drawn.flatten(1)[:, None].round() == ALL.flatten(1)).all(-1).float().mean(0)
    assert torch.allclose(often, likely, atol=0.015)
    assert likely.max() < 0.9


@torch.no_grad()
def test_a_group_is_told_of_those_before_it_and_of_no_other() -> None:
    made, h = network("autoregressive"), torch.randn(1, 16)
    z, other = ALL[:1], ALL[-1:]
    for changed in range(GROUPS):
        mixed = z.clone()
        mixed[:, changed] = other[:, changed]
        differs = (made.prior(h, z) != made.prior(h, mixed)).any(-1)[0]
        assert differs.tolist() == [group > changed for group in range(GROUPS)]


@pytest.mark.parametrize(("kind", "least", "most"), [("factorised", 0.3, 0.7), ("autoregressive", 0.97, 1.0)])
def test_groups_that_tell_of_one_coin_agree_if_each_knows_those_before(kind: Kind, least: float, most: float) -> None:
    made, chance, h = network(kind), torch.Generator().manual_seed(1), torch.zeros(256, 16)
    optimizer = torch.optim.Adam(made.prior_head.parameters(), 0.03)
    for _ in range(150):
        coin = torch.randint(2, (256, 1), generator=chance).expand(-1, GROUPS)
        z = F.one_hot(coin, CLASSES).float()
        loss = kl_divergence((z + 1e-9).log(), made.prior(h, z)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drawn = made.expect(h.new_zeros(4000, 16), sample_latents, chance).argmax(-1)
    assert least <= (drawn[:, 0] == drawn[:, 2]).float().mean() <= most
    assert 0.4 < drawn.float().mean() < 0.6
