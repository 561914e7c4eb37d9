"""Learned positions that are used up in imagination, with worlds of different age in one batch."""

from __future__ import annotations

import torch

from tests.pixel.storm.test_storm import MODE, TINY, batch, generator, imagined, system


def test_a_young_world_sees_no_padding_after_a_rebuild() -> None:
    """It joins worlds whose positions end with the next step, and has nothing before its first frame."""
    world, data = system().world(MODE), batch(steps=8)
    nowhere = torch.zeros(3, 8, dtype=torch.bool)
    at = world.start(data.obs, data.action[:, :-1], nowhere, generator())
    at = imagined(world, at, torch.randint(3, (3, TINY.positions - at.longest)))[-1]
    assert at.longest == TINY.positions
    fresh = world.start(data.obs[1:2, 7:], data.action[1:2, :0], nowhere[1:2, 7:], generator())
    actions = torch.randint(3, (3, 3))
    alone = imagined(world, fresh, actions[2:])
    joined = imagined(world, world.replace(at, torch.tensor([2]), fresh), actions)
    for ours, theirs in zip(joined, alone, strict=True):
        assert torch.allclose(ours.h[2], theirs.h[0], atol=1e-4)
