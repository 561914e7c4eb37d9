"""Rewards and ends of imagined steps are those of the heads, in every system."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from loopwm.pixel.system import FrameBatch, PixelSystem, make_system
from loopwm.pixel.twisted.system import TwistedCoefficients
from tests.fixtures.blocks import PATCH, SPACE
from tests.pixel.edeline import test_edeline
from tests.pixel.storm import test_storm
from tests.pixel.twisted.test_twisted import SMALL

ROWS, LOGIT = 800, 1.1
"""Rows of a world, and the logit that its heads are set to: three of four."""


def storm() -> tuple[PixelSystem, FrameBatch, nn.Sequential, nn.Sequential]:
    made = test_storm.system()
    return made, test_storm.batch(), made.network.end_head, made.network.reward_head


def twisted() -> tuple[PixelSystem, FrameBatch, nn.Sequential, nn.Sequential]:
    made: Any = make_system("twisted", replace(SMALL, patch=(PATCH, PATCH)), TwistedCoefficients(), SPACE)
    data = test_edeline.batch()
    made.prepare([data.obs])
    return made, data, made.network.done_head, made.network.reward_head


def edeline() -> tuple[PixelSystem, FrameBatch, nn.Sequential, nn.Sequential]:
    made = test_edeline.made()
    return made, test_edeline.batch(), made.end_head, made.reward_head


def set_output(head: nn.Sequential, output: torch.Tensor) -> None:
    """Make a head return this whatever its input."""
    last = head[-1]
    assert isinstance(last, nn.Linear)
    last.weight.data.zero_()
    last.bias.data.copy_(output)


@pytest.mark.parametrize("kind", [storm, twisted, edeline])
@torch.no_grad()
def test_imagined_rewards_and_ends_are_the_heads(kind: Any) -> None:
    made, data, end_head, reward_head = kind()
    set_output(end_head, torch.tensor([LOGIT]))
    count = reward_head[-1].out_features
    certain = torch.where(torch.arange(count) == count - 1, 50.0, 0.0)  # the highest reward
    set_output(reward_head, certain)
    chance, world = torch.Generator().manual_seed(0), made.world()
    obs, action, first = (x[:1].repeat(ROWS, *[1] * (x.ndim - 1)) for x in (data.obs, data.action, data.first))
    outcome = world.step(world.start(obs[:, :3], action[:, :2], first[:, :3], chance), action[:, 2], chance)
    assert outcome.terminated.float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert outcome.reward.min() == outcome.reward.max()
    assert outcome.reward[0] >= 1
