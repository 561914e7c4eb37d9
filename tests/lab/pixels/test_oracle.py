"""The simulator itself as an agent's world."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab.pixels.oracle import Oracle, OracleTrainer
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from loopwm.records.config import read_sections
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_actor_critic_learner import FRAMES, config
from tests.pixel.agents.test_agent_trainer import blocks

CONFIGS = Path(__file__).parents[3] / "configs" / "studies"


def test_an_oracle_goes_on_where_it_stands() -> None:
    oracle, env = Oracle(blocks(4), 3), blocks(4)
    policy = [RandomPolicy(SPACE.actions, np.random.default_rng(1)) for _ in range(2)]
    parts, env_state = [], None
    for _ in range(3):
        found = rollout(oracle, policy[0], 4, EnvState.reset(oracle, 7))
        parts.append(found.segments.obs)
    env_state = EnvState.reset(env, 7)
    whole_play = rollout(env, policy[1], 12, env_state).segments.obs
    assert np.array_equal(np.concatenate(parts, 1), whole_play)


def test_an_oracle_shows_the_frames_before_as_imagined_worlds_do() -> None:
    oracle = Oracle(blocks(4), 3)
    obs, info = oracle.reset(seed=7)
    assert "context_obs" not in info
    frames, actions = [obs], [np.array(moves) for moves in ((0, 1, 2, 3), (1, 1, 0, 0), (3, 2, 1, 0))]
    begun = [np.ones(4, bool)]
    for move in actions:
        obs, _, terminated, truncated, _ = oracle.step(move)
        frames.append(obs.copy())
        begun.append(terminated | truncated)
    again, info = oracle.reset()
    assert np.array_equal(again, frames[-1])
    assert np.array_equal(info["context_obs"], np.stack(frames[-3:], 1))
    assert np.array_equal(info["context_action"], np.stack(actions[-2:], 1))
    assert np.array_equal(info["context_first"], np.stack(begun[-3:], 1))


@pytest.mark.parametrize("learner", ["actor-critic", "ppo"])
def test_a_learner_learns_in_the_simulator_itself_without_a_world(tmp_path: Path, learner: str) -> None:
    alone = config(
        actor_critic=FRAMES,
        world={"updates": 0},
        imagination={"updates": 2, "warmup": 30, "count": 3, "steps": 5},
    )
    if learner == "ppo":
        pytest.importorskip("scipy")
        sections = {"system": "storm-agent", "policy": {"channels": [4], "memory": 8, "hidden": 8}}
        sections |= {"real": {"count": 4, "steps": 8, "total": 64, "minibatches": 1}, "world": {"updates": 0}}
        sections |= {"imagination": {"updates": 1, "warmup": 30, "count": 3, "steps": 5}}
        alone = agent_config(sections)
    OracleTrainer(alone, blocks(4), SPACE, tmp_path, blocks(3)).run()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("imagined_reward" in record for record in found)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("oracle-*.yaml")), ids=lambda path: path.stem)
def test_committed_oracle_configurations_can_be_read(path: Path) -> None:
    assert not agent_config(read_sections(path)).has_world
