"""Imagined against real rollouts from the same states: a perfect world has no gap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lab.pixels import reality_gap
from lab.pixels.reality_gap import Noisy, before_truncation, contexts, measure, outcomes, pairs_in_order
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from tests.fixtures.blocks import SPACE
from tests.lab.pixels.test_open_loop import TrueWorld
from tests.pixel.agents.test_actor_critic_learner import agent, storm
from tests.pixel.agents.test_agent_trainer import blocks, config


@pytest.mark.parametrize("blind", [None, False, True])
def test_a_perfect_world_has_no_gap_and_others_have(tmp_path: Any, monkeypatch: Any, blind: bool | None) -> None:
    """blind: of a true world, None for the trained one."""
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(reality_gap, "real_environments", lambda name, count: (blocks(count), SPACE))
    monkeypatch.setattr(reality_gap, "REPLAYED", 12)
    if blind is not None:
        load = reality_gap.load_agent
        monkeypatch.setattr(reality_gap, "load_agent", lambda *a: replace(load(*a), world=TrueWorld(blind)))
    results = measure(tmp_path / "run", 6, 0)
    assert results["starts"] == 24
    for name in ("agent", "random"):
        for outcome in results[name].values():
            assert outcome["gap"] == pytest.approx(outcome["imagined"] - outcome["real"])
            assert outcome["ci95"][0] <= outcome["gap"] <= outcome["ci95"][1]
    if blind is not None:
        assert (results["random"]["ended"]["gap"] == 0) == (not blind)
        assert (results["random"]["reward"]["ci95"] == [0, 0]) == (not blind)


def test_a_start_ends_with_the_current_frame_of_its_row() -> None:
    env, policy = blocks(3), RandomPolicy(SPACE.actions, np.random.default_rng(0))
    lead = rollout(env, policy, 9, EnvState.reset(env, 0))
    found = contexts(lead.segments, lead.env_state, SPACE).sample(3, 4, np.random.default_rng(0), True)
    assert np.array_equal(found.obs[:, -1], lead.env_state.obs)
    assert np.array_equal(found.first[:, -1], lead.env_state.first)
    assert np.array_equal(found.obs[:, :-1], lead.segments.obs[:, -3:])
    assert np.array_equal(found.action[:, :-1], lead.segments.action[:, -3:])


def test_outcomes_count_up_to_the_first_end() -> None:
    env = blocks(2)
    played = rollout(env, RandomPolicy(4, np.random.default_rng(0)), 3, EnvState.reset(env, 0)).segments
    reward = np.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], np.float32)
    ends = np.array([[False, True, True], [False, False, False]])
    cut = np.array([[False, False, True], [False, True, False]])
    played = replace(played, reward=reward, terminated=ends, truncated=cut)
    assert outcomes(played, np.ones((2, 3), dtype=bool)).tolist() == [[3, 1], [7, 0]]
    assert before_truncation(played).tolist() == [[True] * 3, [True, True, False]]
    assert outcomes(played, before_truncation(played)).tolist() == [[3, 1], [3, 0]]


class Upwards:
    """Policy of one action."""

    def __call__(self, obs: Any, first: Any, info: Any) -> Any:
        return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_noisy_policy_acts_at_random_in_its_share(share: float) -> None:
    policy = Noisy(Upwards(), 4, share, seed=0)
    actions = np.concatenate([policy(np.zeros(100), np.zeros(100, bool), {}) for _ in range(100)])
    assert (actions != 0).mean() == pytest.approx(0.75 * share, abs=0.02)


def test_noisy_agent_carries_along_the_action_taken() -> None:
    world, env, given = storm().world(), blocks(4), []
    observe = world.observe

    def observed(state: Any, action: Any, *rest: Any) -> Any:
        given.append(action.tolist())
        return observe(state, action, *rest)

    world.observe = observed  # type: ignore[method-assign]
    player = agent().player(4, torch.Generator().manual_seed(0), world)
    played = rollout(env, Noisy(player, SPACE.actions, 0.5, 0), 6, EnvState.reset(env, 0)).segments
    assert given == played.action[:, :-1].T.tolist()


def test_pairs_are_in_order_where_imagination_agrees() -> None:
    assert pairs_in_order([1, 2, 3], [10, 20, 30]) == 1
    assert pairs_in_order([1, 2, 3], [3, 2, 1]) == 0
    assert pairs_in_order([1, 2, 3], [1, 3, 2]) == pytest.approx(2 / 3)
    assert pairs_in_order([1, 2], [2, 2]) == 0
