"""Sinkhorn iterations and the rounding of their plans, against the printed algorithms and the exact solution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lab.pixels.sinkhorn import Sinkhorn, binarize
from loopwm.pixel.twisted.decoding import ExactAssignment
from tests.pixel.twisted import test_decoding as exact
from tests.pixel.twisted.test_decoding import generator, objectives, problems, whole
from tests.reference import transport as reference

SOLVERS = [Sinkhorn(), Sinkhorn(epsilon=0.02, iterations=30)]


@pytest.mark.parametrize("epsilon", [0.05, 0.5])
@pytest.mark.parametrize("iterations", [1, 7])
def test_the_sinkhorn_plan_is_that_of_the_printed_square_problem(epsilon, iterations):
    copy, wildcard = problems(4, (3, 4), 0.05, 0.6)
    log_copy, log_wildcard = Sinkhorn(epsilon, iterations).log_plan(copy, wildcard)
    for row in range(4):
        prev, gen = reference.sinkhorn(*whole(copy[row], wildcard[row]), epsilon, iterations)
        np.testing.assert_allclose(log_copy[row].exp(), prev, atol=1e-5)
        np.testing.assert_allclose(log_wildcard[row].exp(), gen.diagonal(), atol=1e-5)


def test_binarization_equals_the_rule_in_words():
    for seed in range(20):
        values = torch.rand(3, 6, 6, generator=generator(seed)).mul(8).round()  # many equal ones
        values[torch.rand(values.shape, generator=generator(seed)) < 0.3] = -math.inf
        wildcard = torch.rand(3, 6, generator=generator(seed + 100)).mul(5).round()
        found = binarize(values, wildcard)
        assert found.tolist() == [reference.binarize(*whole(values[row], wildcard[row])) for row in range(3)]


def test_columns_that_all_want_one_source_settle_in_as_many_rounds():
    copy = torch.arange(7.0, 0, -1)[None, :, None].expand(1, 7, 7) * 10 + torch.arange(7.0)
    assert binarize(copy, torch.zeros(1, 7)).tolist() == [[6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize(("c_d", "c_w", "seed"), [(0.05, 0.6, 3), (0.05, 0.6, 4), (0.6, 0.3, 3), (0.2, 0.05, 3)])
def test_sinkhorn_with_enough_iterations_agrees_with_exact_assignment_and_the_printed_ten_do_not(c_d, c_w, seed):
    copy, wildcard = problems(250, (3, 3), c_d, c_w, seed)  # 1,000 in all
    exact = ExactAssignment()(copy, wildcard)
    best = objectives(copy, wildcard, exact)

    converged = Sinkhorn(epsilon=0.01, iterations=200)
    log_copy, log_wildcard = converged.log_plan(copy, wildcard)
    value = (log_copy.exp() * copy.nan_to_num(neginf=0)).sum((1, 2)) + (log_wildcard.exp() * wildcard).sum(1)
    assert (value - best).abs().max() < 0.05
    found = binarize(log_copy, log_wildcard)
    lost = best - objectives(copy, wildcard, found)
    assert lost.mean() < 0.02
    assert (lost < 1e-4).float().mean() > 0.95
    assert c_d < c_w or torch.equal(found, exact)

    printed = Sinkhorn(epsilon=1e-5, iterations=10)(copy, wildcard)
    assert (best - objectives(copy, wildcard, printed)).mean() > 0.5
    assert (printed == exact).float().mean() < 0.8


def test_sinkhorns_threshold_ends_it_once_nothing_changes():
    torch.manual_seed(0)
    copy, wildcard = torch.rand(2, 6, 6), torch.rand(2, 6)
    whole = Sinkhorn(0.05, 2000).log_plan(copy, wildcard)
    early = Sinkhorn(0.05, 2000, threshold=1e-3).log_plan(copy, wildcard)
    assert (whole[0].exp() - early[0].exp()).abs().max() < 5e-3
    never = Sinkhorn(0.05, 10, threshold=1e-9).log_plan(copy, wildcard)[0]
    assert torch.equal(never, Sinkhorn(0.05, 10).log_plan(copy, wildcard)[0])
    spread = torch.cat((copy.flatten(1), wildcard), 1).std(1, correction=0)
    for row in range(2):
        one = Sinkhorn(0.1, 50, relative=True).log_plan(copy[row : row + 1], wildcard[row : row + 1])[0]
        plain = Sinkhorn(0.1 * spread[row].item(), 50).log_plan(copy[row : row + 1], wildcard[row : row + 1])[0]
        assert torch.allclose(one.exp(), plain.exp(), atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_properties_of_the_exact_solution_hold_for_sinkhorn(solver):
    for c_d, c_w in ((0.05, 0.6), (0.6, 0.3), (0.0, 1.0)):
        exact.test_nothing_is_copied_twice(solver, c_d, c_w)
    exact.test_the_best_copy_is_kept_in_place_when_the_model_is_sure_of_it(solver)
    exact.test_outside_the_region_tokens_are_sampled_and_no_copy_crosses_its_border(solver)
    exact.test_a_frame_is_decoded_alone_as_in_a_batch(solver)


def test_sinkhorn_with_enough_iterations_copies_a_token_that_moved():
    solver = Sinkhorn(epsilon=0.02, iterations=100)
    exact.test_a_token_that_moved_is_copied_at_a_low_price_of_distance_and_not_at_the_printed_one(solver)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epsilon": 0}, "epsilon: must be above 0, got 0"), ({"iterations": 0}, "iterations: must be at least 1, got 0")],
)
def test_impossible_settings_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        Sinkhorn(**settings)
