"""Depths in training."""

from __future__ import annotations

from statistics import mean

import torch

from loopwm.core.depth import DepthPlan, backward_loops, ramped_mean


def test_depth_and_noise_depend_only_on_seed_step_and_global_row():
    together = DepthPlan.sample(7, 3, range(6), 4.0, 12)
    apart = [DepthPlan.sample(7, 3, [row], 4.0, 12) for row in range(6)]
    assert together.loops == tuple(plan.loops[0] for plan in apart)
    device = torch.device("cpu")
    for row, plan in enumerate(apart):
        shorter = plan.initial_state(3, 16, device)[0]
        # Vectorised and scalar code may differ in the last bit.
        torch.testing.assert_close(together.initial_state(5, 16, device)[row, :3], shorter, atol=1e-6, rtol=1e-5)
    assert together.loops != DepthPlan.sample(7, 4, range(6), 4.0, 12).loops


def test_sampled_depths_are_poisson_with_a_floor_of_one_and_noise_has_the_stated_variance():
    plan = DepthPlan.sample(0, 0, range(4000), 4.0, 12)
    assert min(plan.loops) == 1
    assert max(plan.loops) <= 12
    assert abs(mean(plan.loops) - (4 + 2.718281828**-4)) < 0.1
    assert plan.mu_bwd == 2
    noise = DepthPlan((1,), 1, (0,)).initial_state(2000, 10, torch.device("cpu"))
    assert abs(noise.std().item() / (2 / 50) ** 0.5 - 0.987) < 0.02  # cutting at three deviations removes 1.3 %
    assert noise.abs().max() <= 3 * (2 / 50) ** 0.5


def test_other_samplings_share_noise_and_differ_in_depth_alone():
    apart = DepthPlan.sample(7, 3, range(6), 4.0, 12)
    alike = DepthPlan.sample(7, 3, range(6), 4.0, 12, sampling="per_batch")
    constant = DepthPlan.sample(7, 3, range(6), 4.0, 12, sampling="fixed")
    assert len(set(apart.loops)) > 1
    assert alike.loops == (apart.loops[0],) * 6
    assert constant.loops == (4,) * 6
    assert apart.noise_seeds == alike.noise_seeds == constant.noise_seeds
    means = [DepthPlan.sample(7, step, range(6), 4.0, 12, sampling="per_batch").loops[0] for step in range(2000)]
    assert abs(sum(means) / 2000 - (4 + 2.718281828**-4)) < 0.15


def test_the_ramp_ends_at_mu_rec():
    assert [ramped_mean(4.0, step, 0, 6) for step in (0, 2, 6, 99)] == [1.0, 2.0, 4.0, 4.0]
    assert ramped_mean(4.0, 0, 0, 0) == 4.0
    assert [ramped_mean(4.0, step, 5, 0) for step in (0, 4, 5)] == [1.0, 1.0, 4.0]


def test_backward_loops_are_half_of_the_mean_rounded_up():
    assert [backward_loops(mu_rec) for mu_rec in (1.0, 1.6, 2.0, 3.0, 4.0, 5.5)] == [1, 1, 1, 2, 2, 3]


def test_a_mean_of_one_is_one_loop():
    assert set(DepthPlan.sample(0, 0, range(200), ramped_mean(4.0, 9, 10, 10), 8).loops) == {1}
