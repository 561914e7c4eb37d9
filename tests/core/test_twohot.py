from __future__ import annotations

import math

import pytest
import torch

from loopwm.core.twohot import BINS, LIMIT, symexp, symlog, two_hot, two_hot_loss, two_hot_value

VALUES = torch.tensor([0.0, 1e-3, -0.01, 0.05, -1.0, 3.7, -250.0, 1e6, -4e8])


def test_a_value_survives_the_round_trip_through_its_distribution():
    torch.testing.assert_close(symexp(symlog(VALUES)), VALUES, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two_hot_value(two_hot(VALUES).log()), VALUES, rtol=1e-4, atol=1e-5)


def test_mass_lies_on_the_two_bins_around_the_value_and_sums_to_one():
    for value, row in zip(VALUES.tolist(), two_hot(VALUES).tolist(), strict=True):
        place = (math.copysign(math.log1p(abs(value)), value) + LIMIT) / (2 * LIMIT) * (BINS - 1)
        used = [i for i, mass in enumerate(row) if mass > 0]
        assert used in ([math.floor(place)], [math.floor(place), math.floor(place) + 1], [math.ceil(place)])
        assert sum(row) == pytest.approx(1, abs=1e-6)
        assert sum(i * mass for i, mass in enumerate(row)) == pytest.approx(place, abs=1e-4)


def test_values_beyond_the_bins_are_cut_to_the_outermost():
    beyond = two_hot(torch.tensor([1e12, -1e12]))
    assert beyond.argmax(-1).tolist() == [BINS - 1, 0]
    torch.testing.assert_close(beyond.sum(-1), torch.ones(2))


def test_the_loss_is_lowest_at_the_target_distribution_where_it_is_its_entropy():
    target = torch.tensor([0.05])
    best = two_hot(target)
    entropy = -(best[best > 0] * best[best > 0].log()).sum()
    torch.testing.assert_close(two_hot_loss((best + 1e-30).log(), target)[0], entropy)
    generator = torch.Generator().manual_seed(0)
    others = (best + 1e-30).log() + torch.randn(20, BINS, generator=generator)
    assert (two_hot_loss(others, target.expand(20)) > entropy).all()


def test_equal_logits_stand_for_zero():
    assert two_hot_value(torch.zeros(1, BINS)).abs().item() < 1e-4
