"""Packaging an agent's world: what is written can be played in, and the card is what is measured again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab.pixels import packaged_world
from lab.pixels.packaged_world import SHARES, package, played, policies, rows, write_card
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import CATCH, make_vector_env, real_environments
from loopwm.pixel.imagined import RandomPolicy
from loopwm.records.errors import InputError
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_agent_trainer import blocks, config


def test_a_packaged_world_can_be_played_in(tmp_path, monkeypatch):
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(packaged_world, "real_environments", lambda name, count: (blocks(count), SPACE))
    card = package(tmp_path / "run", tmp_path / "world", starts=5, rollouts=20, ages=3, seed=1)
    assert card == json.loads((tmp_path / "world/card.json").read_text())
    assert [row["age"] for row in card["agent"]] == [1, 2, 3]
    assert all(row["n_real"] <= 20 and 0 <= row["whole"] <= 1 for row in card["random"])
    assert [row["random_share"] for row in card["policies"]["rewards"]] == list(SHARES)
    assert 0 <= card["policies"]["pairs_in_order"] <= 1
    assert len(list((tmp_path / "world/starts").iterdir())) == 5
    assert (card["own_agent"], card["interactions"]) == (True, 128)
    AgentTrainer(config(run={"seed": 3}, real={"total": 64}), blocks(4), SPACE, tmp_path / "other").run()
    other = write_card(tmp_path / "other", tmp_path / "world", 20, 3, 1)
    assert (other["own_agent"], other["interactions"]) == (False, 128)
    assert other["random"] == card["random"]
    worlds = make_vector_env(2, tmp_path / "world", context=2)
    assert worlds.reset(seed=0)[0].shape == (2, *SPACE.frame_shape)
    with pytest.raises(InputError, match=r"--seed: must differ from the run's \(0\)"):
        package(tmp_path / "run", tmp_path / "again", starts=5, rollouts=20, ages=3, seed=0)
    with pytest.raises(InputError, match="--starts: must be at most"):
        package(tmp_path / "run", tmp_path / "again", starts=10_000, rollouts=20, ages=3, seed=1)


def test_policies_of_a_card_are_those_compared():
    gaps = [{"real": r, "imagined": i, "ci95": [i - r - 0.1, i - r + 0.1]} for r, i in ((3, 3), (2, 2.5), (1, 2.6))]
    gaps += [{"real": 0.0, "imagined": 0.0, "ci95": [0.0, 0.0]}] * 2
    found = policies(gaps)
    assert found["pairs_in_order"] == 0.8  # of ten pairs one is swapped and one equal
    assert found["rewards"][1] == {"random_share": 0.25, "gap_ci95": [0.4, 0.6], "real": 2, "imagined": 2.5}


def test_pixels_of_a_card_count_objects():
    card = json.loads((CATCH / "card.json").read_text())
    env, space = real_environments("catch", 4)
    play = played(env, RandomPolicy(space.actions, np.random.default_rng(7)), space, 7, "random")
    found = rows(load_checkpoint(CATCH).world(), play, 100, card["context"], 3, 7)
    assert all(row["pixels_real"] == [2.0] for row in found)  # ball and paddle
    assert all(1.9 < row["pixels_imagined"][0] < 2.1 for row in found)


def test_the_card_of_catch_is_of_the_packaged_world():
    """In other play, with other noise: figures of 500 rollouts lie around those of the card."""
    card = json.loads((CATCH / "card.json").read_text())
    env, space = real_environments("catch", 8)
    play = played(env, RandomPolicy(space.actions, np.random.default_rng(7)), space, 7, "random")
    found = rows(load_checkpoint(CATCH).world(), play, 500, card["context"], 8, 7)
    for ours, theirs in zip(found, card["random"], strict=True):
        assert ours["exact"] == pytest.approx(theirs["exact"], abs=0.08)
        assert ours["end_imagined"] == pytest.approx(theirs["end_imagined"], abs=0.08)
