"""A world is learned in when it can be trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.agents.validation_gate import ValidationGateConfig, lit_pixels, means, open_loop_rollouts, whole
from loopwm.pixel.imagined import EnvState, Imagined, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError
from tests.fixtures.blocks import COLUMNS, MOVES, PATCH, ROWS, SPACE, drawn
from tests.pixel.agents.test_actor_critic_learner import config
from tests.pixel.agents.test_agent_trainer import blocks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrueWorld:
    """The blocks as they are; `blind` worlds end by chance and show nothing."""

    blind: bool = False
    space = SPACE

    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> Tensor:
        corners = obs[:, -1, ::PATCH, ::PATCH, 0].flatten(1)
        at = (corners == 200).long().argmax(1)
        return torch.stack((at // COLUMNS, at % COLUMNS), 1)

    def step(self, state: Tensor, action: Tensor, generator: torch.Generator) -> Imagined[Tensor]:
        state = (state + torch.tensor(MOVES)[action]) % torch.tensor((ROWS, COLUMNS))
        there = (state == 0).all(1)
        if self.blind:
            there = torch.rand(len(state), generator=generator) < 0.5
        return Imagined(there.float(), there, state)

    def show(self, state: Tensor) -> Tensor:
        frames = np.stack([drawn(place, (2, 3)) for place in state.numpy()])
        return torch.from_numpy(frames * (not self.blind))


@pytest.fixture(scope="module")
def play() -> Replay:
    replay, env = Replay(SPACE, 10_000), blocks(8)
    policy = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    replay.add_segments(rollout(env, policy, 200, EnvState.reset(env, 0)).segments, "random", 0)
    return replay


def look(world: TrueWorld, play: Replay) -> Any:
    made: Any = world
    return open_loop_rollouts(made, play, 256, 3, 6, np.random.default_rng(0), CPU)


def test_the_true_world_is_trusted_and_a_blind_one_is_not(play: Replay) -> None:
    true, blind = (look(TrueWorld(blind), play).overall() for blind in (False, True))
    assert true["objects"] == 1.0
    assert true["reward_real"] == pytest.approx(true["reward_imagined"], abs=0.02)
    assert true["ends"] < 0.2
    assert blind["objects"] == 0.0
    assert blind["ends"] > 1.0


def test_what_lies_behind_the_first_end_does_not_count(play: Replay) -> None:
    found = look(TrueWorld(), play)
    for end, valid in zip(found.imagined["end"], found.imagined["valid"], strict=True):
        expected = len(end) if not end.any() else int(end.argmax()) + 1
        assert valid.tolist() == [t < expected for t in range(len(end))]
    assert not found.real["valid"][:, 1:][found.real["end"][:, :-1]].any()
    real, imagined = (means(part, "reward", 0) for part in (found.real, found.imagined))
    assert real.shape == imagined.shape == (6,)
    valid = found.real["valid"][:, 3]
    assert real[3] == pytest.approx(found.real["reward"][valid, 3].mean())


def test_frames_with_two_balls_or_none_are_not_whole() -> None:
    real = np.zeros((4, 3, 3, 2), np.uint8)
    real[np.arange(4), np.arange(4) % 3, 1, 0] = 255  # one ball
    real[2:, 0, 0, 1] = 255  # sometimes a paddle
    imagined = np.zeros((1, 4, 3, 3, 2), np.uint8)
    imagined[0, 0, 2, 2, 0] = 255
    imagined[0, 1, 2, :2, 0] = 255
    imagined[0, 3, 2, 2, 0] = imagined[0, 3, :2, 0, 1] = 255
    assert lit_pixels(imagined)[0].tolist() == [[1, 0], [2, 0], [0, 0], [1, 2]]
    assert whole(imagined, real)[0].tolist() == [True, False, False, False]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gated(**gate: float) -> Any:
    settings = {
        "updates": 2,
        "warmup": 30,
        "count": 4,
        "steps": 5,
        "burn_in": 3,
        "validation_gate": gate | {"every": 1, "steps": 3},
    }
    return config(imagination=settings)


@pytest.mark.parametrize(("bar", "passes"), [({"ends": 1e6}, True), ({"objects": 1.0, "ends": 1e-9}, False)])
def test_no_imagined_update_before_the_world_passes_and_the_log_says_when(
    tmp_path: Path, bar: dict[str, float], passes: bool
) -> None:
    trainer = AgentTrainer(gated(**bar), blocks(4), SPACE, tmp_path)
    trainer.run()
    found = records(tmp_path)
    assert all({"gate_ends", "gate_objects", "gate_open"} <= record.keys() for record in found)
    assert [record["gate_open"] for record in found] == [float(passes)] * 4
    assert ["imagined_loss" in record for record in found] == [passes] * 4
    assert len(trainer.replay) == 3 * 32
    assert len(trainer.held_out) == 32


def test_held_out_play_and_trust_are_resumed(tmp_path: Path) -> None:
    AgentTrainer(gated(ends=1e6), blocks(4), SPACE, tmp_path).run(max_minutes=1e-4)
    again = AgentTrainer(gated(ends=1e6), blocks(4), SPACE, tmp_path)
    assert again.gate_open
    assert len(again.held_out) == again.interactions // 4 > 0
    again.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": 1.5}, r"objects: must be between 0 and 1, got 1.5"),
        ({"ends": -0.1}, r"ends: must be at least 0, got -0.1"),
    ],
)
def test_bars_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValidationGateConfig(**change)  # type: ignore[arg-type]


def test_one_environment_cannot_be_held_out_of_one() -> None:
    made = gated(ends=0.2)
    with pytest.raises(InputError, match=r"imagination.validation_gate: .* real.count must be above 1"):
        replace(made, real=replace(made.real, count=1))


def test_config_deprecated_trust_key_sets_validation_gate(capsys: pytest.CaptureFixture[str]) -> None:
    imagination = {"burn_in": 3, "trust": {"ends": 0.2, "stretches": 7}}
    made = agent_config({"system": "twisted-agent", "imagination": imagination})
    assert made.imagination.burn_in == 3
    assert made.imagination.validation_gate == ValidationGateConfig(ends=0.2, rollouts=7)
    line = "warning: imagination.trust is deprecated: use imagination.validation_gate\n"
    assert capsys.readouterr().err == line
