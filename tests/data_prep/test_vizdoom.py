"""ViZDoom's scenarios as EDELINE's authors have them (EDELINE, appendix D.10)."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.environments.pixels.by_name import make_frame_environment
from data_prep.environments.pixels.vizdoom import SCENARIOS, Counters

BEFORE = Counters(kills=2, hits=5, medkits=1, goals=0, deaths=0, health=60)


@pytest.mark.parametrize(
    ("name", "after", "reward"),
    [
        ("basic", Counters(kills=3, hits=5, medkits=1), 1),
        ("deadly_corridor", Counters(kills=3, hits=9, medkits=1), 1 - 4),
        ("deadly_corridor", Counters(kills=2, hits=5, medkits=1, goals=1), 1),
        ("defend_the_center", Counters(kills=4, hits=7, medkits=1, deaths=1), 2 - 1),
        ("health_gathering", Counters(kills=2, hits=6, medkits=2, deaths=1, health=0), 1),
        ("predict_position", Counters(kills=3, hits=5, medkits=1), 1),
    ],
)
def test_a_reward_is_what_the_counters_grew_by(name: str, after: Counters, reward: float) -> None:
    assert SCENARIOS[name].reward(BEFORE, after) == reward


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_episode_pays_what_happened_in_it_and_ends_by_death_by_itself_or_at_its_limit(name: str) -> None:
    pytest.importorskip("vizdoom", reason="pip install 'loopwm[vizdoom]'")
    scenario, rng = SCENARIOS[name], np.random.default_rng(0)
    env = make_frame_environment(f"vizdoom/{name}")
    game = env._simulator._env.unwrapped.game  # type: ignore[attr-defined]
    ends = []
    for seed in range(3):
        _, info = env.reset(seed=seed)
        total, steps, terminated, truncated = 0.0, 0, False, False
        assert 90 < info["metric"] <= 100 if scenario.metric == "health" else info["metric"] == 0
        while not (terminated or truncated):
            _, reward, terminated, truncated, info = env.step(rng.integers(env.space.actions))
            total, steps = total + reward, steps + 1
        assert steps <= scenario.limit
        assert truncated == (steps == scenario.limit and not game.is_player_dead() and not terminated)
        assert terminated == (game.is_episode_finished() and not truncated)
        ends.append((total, info["metric"], game.is_player_dead()))
    if name in ("basic", "predict_position"):
        assert all(total == metric for total, metric, _ in ends)
    if name == "defend_the_center":
        assert all(total == metric - dead for total, metric, dead in ends)
        assert any(metric > 0 for _, metric, _ in ends)
    if name == "health_gathering":
        assert all(dead == (metric == 0) for _, metric, dead in ends)
    if name == "deadly_corridor":
        assert all(total < 0 and metric == 0 for total, metric, _ in ends)
    env.close()
