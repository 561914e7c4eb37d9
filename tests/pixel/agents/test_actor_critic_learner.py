"""The actor-critic as a learner: what it records in real play, what it carries along, and dreams without frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwm.pixel.agents.actor_critic_learner import ActorCriticAgent, FrameReader, LatentReader, RecordingPlayer
from loopwm.pixel.agents.agent_trainer import AgentTrainer, WorldLearner
from loopwm.pixel.agents.config import AgentConfig, agent_config
from loopwm.pixel.agents.learner import Chance, Dream
from loopwm.pixel.imagined import EnvState, ImaginedVectorEnv, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.pixel.storm.model import StormConfig
from loopwm.pixel.storm.system import StormObjective, StormSystem
from loopwm.pixel.training_config import training_config
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_agent_trainer import blocks

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = {"groups": 4, "classes": 4, "image": "small", "stem": 4, "dim": 16, "heads": 2, "mlp_dim": 32}


def config(**changes: dict[str, Any]) -> AgentConfig:
    sections: dict[str, Any] = {
        "model": MODEL | {"positions": 12, "context": 4},
        "actor_critic": {"hidden": 16},
        "real": {"count": 4, "steps": 8, "total": 128, "epochs": 1, "minibatches": 1},
        "world": {"updates": 2, "rows": 4, "steps": 6, "minibatches": 1, "warmup": 30},
        "imagination": {"updates": 2, "warmup": 60, "count": 4, "steps": 5, "burn_in": 3},
        "run": {"save_every": 1, "device": "cpu"},
    }
    for section, values in changes.items():
        sections[section] = sections[section] | values
    return agent_config({"system": "storm-agent", "learner": "actor-critic", **sections})


FRAMES: dict[str, Any] = {"channels": [4, 8], "memory": 8, "from_play": True}


def agent(**changes: Any) -> ActorCriticAgent:
    """One whose heads say something."""
    torch.manual_seed(0)
    made = ActorCriticAgent(config(actor_critic={"hidden": 16} | changes), SPACE, 32)
    for parameter in made.network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def storm() -> StormSystem:
    torch.manual_seed(0)
    made = config()
    return StormSystem(made.model, made.objective, SPACE).eval()


def test_what_is_recorded_is_what_the_network_reads_again() -> None:
    """Two rollouts of an agent with a memory, on from each other, with ends and truncations."""
    made, env = agent(**FRAMES), blocks(4)
    player = RecordingPlayer(made.network, FrameReader(), 4, torch.Generator().manual_seed(0))
    env_state, memory = EnvState.reset(env, 0), made.network.initial(4, torch.device("cpu"))
    for _ in range(2):
        data, found = player.play(env, 10, env_state)
        env_state, s = found.env_state, found.segments
        assert torch.equal(data.inputs[:, :-1], torch.from_numpy(s.obs))
        assert torch.equal(data.inputs[:, -1], torch.from_numpy(env_state.obs))
        assert torch.equal(data.first[:, :-1], torch.from_numpy(s.first))
        assert torch.equal(data.action, torch.from_numpy(s.action))
        assert torch.allclose(data.memory, memory, atol=1e-5)
        with torch.no_grad():
            _, memory = made.network.remember(data.inputs[:, :-1], data.first[:, :-1], memory)
        assert data.truncated.any()
        assert data.terminated.any()


def test_a_truncated_episode_is_worth_what_its_own_last_frame_is() -> None:
    made, env = agent(**FRAMES), blocks(4)
    player = RecordingPlayer(made.network, FrameReader(), 4, torch.Generator().manual_seed(0))
    data, found = player.play(env, 16, EnvState.reset(env, 0))
    rows, steps = data.truncated.nonzero(as_tuple=True)
    for b, t in zip(rows.tolist(), steps.tolist(), strict=True):
        inputs = torch.cat(
            (data.inputs[b : b + 1, : t + 1], torch.from_numpy(found.segments.next_obs[b : b + 1, t : t + 1])), 1
        )
        first = torch.nn.functional.pad(data.first[b : b + 1, : t + 1], (0, 1))
        with torch.no_grad():
            out = made.network(inputs, first, data.memory[b : b + 1])
        assert torch.allclose(made.network.value(out.critic)[0, -1], data.final_value[b, t], atol=1e-5)


def test_the_world_that_is_carried_along_knows_the_last_frames() -> None:
    """Ends in between included; latents are drawn, so the prior's part of what is read is compared."""
    world, env = storm().world(config().sampling), blocks(4)
    made = agent()
    player = RecordingPlayer(made.network, LatentReader(world, torch.Generator().manual_seed(0)), 4, torch.Generator())
    data, found = player.play(env, 9, EnvState.reset(env, 0))
    s = found.segments
    assert s.first[:, 1:].any()
    assert data.inputs.shape == (4, 10, 32)
    began = torch.from_numpy(np.concatenate((s.first, found.env_state.first[:, None]), 1))
    assert torch.equal(data.inputs[..., 16:].abs().sum(-1) == 0, began)  # h is empty exactly where an episode begins


def test_imagination_in_latents_draws_no_frame() -> None:
    class Blind:
        def __init__(self, world: Any) -> None:
            self._world = world

        def __getattr__(self, name: str) -> Any:
            if name == "show":
                raise AssertionError("a frame was drawn")
            return getattr(self._world, name)

    made, env = agent(), blocks(4)
    trainer_replay = Replay(SPACE, 1000)
    player = made.player(4, torch.Generator(), storm().world())
    trainer_replay.add_segments(rollout(env, player, 12, EnvState.reset(env, 0)).segments, "agent", 0)
    world: Any = Blind(storm().world())
    before = {name: tensor.clone() for name, tensor in made.network.state_dict().items()}
    told = made.learn_from_imagination(Dream(env, world, trainer_replay), config().imagination, Chance.of(0))
    assert {"reward", "ends", "loss", "entropy", "scale"} <= told.keys()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in made.network.state_dict().items())


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_world_waits_for_its_warm_up_imagination_for_its_own(tmp_path: Path) -> None:
    AgentTrainer(config(), blocks(4), SPACE, tmp_path).run()
    found = records(tmp_path)
    assert [record["interactions"] for record in found] == [32, 64, 96, 128]
    assert ["world_loss" in record for record in found] == [True] * 4
    assert ["imagined_reward" in record for record in found] == [False, True, True, True]


def test_a_resumed_run_goes_on_from_all_that_was_saved(tmp_path: Path) -> None:
    first = AgentTrainer(config(), blocks(4), SPACE, tmp_path)
    first.run(max_minutes=0.0001)
    state = first.state_dict()
    again = AgentTrainer(config(), blocks(4), SPACE, tmp_path)
    restored = again.state_dict()
    assert restored["counts"] == state["counts"]
    assert 0 < state["counts"][1] < 128
    for part in ("network", "slow_critic"):
        assert all(torch.equal(restored["learner"][part][k], v) for k, v in state["learner"][part].items())
    assert restored["learner"]["scale"] == state["learner"]["scale"]
    assert all(torch.equal(restored["world"]["model"][k], v) for k, v in state["world"]["model"].items())
    again.run()
    assert [record["interactions"] for record in records(tmp_path)] == [32, 64, 96, 128]


def test_storm_is_trained_without_the_frames_after(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, replay, shapes = WorldLearner(config(), SPACE, torch.device("cpu")), Replay(SPACE, 1000), []
    env = blocks(4)
    policy = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    replay.add_segments(rollout(env, policy, 12, EnvState.reset(env, 0)).segments, "random", 0)
    loss = learner.system.loss

    def recorded(batch: Any, *rest: Any) -> Any:
        shapes.append((batch.obs.shape, batch.next_obs.shape))
        return loss(batch, *rest)

    monkeypatch.setattr(learner.system, "loss", recorded)
    learner.update(replay, np.random.default_rng(0))
    assert shapes == [((4, 6, *SPACE.frame_shape), (4, 0, *SPACE.frame_shape))]


@pytest.mark.parametrize("imagines", [True, False])
def test_an_agent_that_reads_frames_learns_from_play_and_from_imagined_frames(tmp_path: Path, imagines: bool) -> None:
    rest = {} if imagines else {"world": {"updates": 0}, "imagination": {"updates": 0}}
    AgentTrainer(config(actor_critic=FRAMES, **rest), blocks(4), SPACE, tmp_path).run()
    found = records(tmp_path)
    assert all("real_value_loss" in record for record in found)
    assert ("imagined_value_loss" in found[-1]) == imagines


def test_an_agent_with_neither_features_nor_channels_is_refused(tmp_path: Path) -> None:
    alone = config(world={"updates": 0}, imagination={"updates": 0})
    with pytest.raises(InputError, match=r"actor_critic.channels: must be set"):
        AgentTrainer(alone, blocks(4), SPACE, tmp_path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("storm-*.yaml")), ids=lambda path: path.stem)
def test_configurations_in_the_box_can_be_read(path: Path) -> None:
    sections = read_sections(path)
    read = agent_config if sections["system"].endswith("-agent") else training_config
    assert isinstance(read(sections).model, StormConfig)


def test_the_configuration_of_atari_is_table_9() -> None:
    made = agent_config(read_sections(CONFIGS / "storm-atari.yaml"))
    assert (made.model.dim, made.model.heads, made.model.context, made.model.positions) == (512, 8, 16, 64)
    assert (made.world.rows, made.world.steps, made.world.learning_rate, made.world.clip_norm) == (16, 64, 1e-4, 1000)
    c = made.imagination
    assert (c.count, c.burn_in, c.steps) == (1024, 8, 16)
    played = made.real.count * made.real.steps
    assert made.world.updates == c.updates == played
    learner = made.actor_critic
    assert (learner.gamma, learner.td_lambda, learner.entropy_coef) == (0.985, 0.95, 3e-4)
    assert (learner.slow_decay, learner.learning_rate, learner.clip_norm) == (0.98, 3e-5, 100)
    assert made.objective == StormObjective(0.5, 0.1, 1.0)


def test_imagined_worlds_that_begin_in_mid_episode_are_looked_at_with_the_frames_before() -> None:
    system, env, replay = storm(), blocks(4), Replay(SPACE, 1000)
    made = agent(channels=[4, 8], memory=8)
    player = made.player(4, torch.Generator(), None)
    replay.add_segments(rollout(env, player, 12, EnvState.reset(env, 0)).segments, "agent", 0)
    world = system.world(config().sampling)
    imagined = ImaginedVectorEnv(world, replay, 4, 3, 6)
    obs, info = imagined.reset(seed=0)
    player = made.player(4, torch.Generator(), None)
    with torch.no_grad():
        inputs, first, _ = player.look(obs, np.ones(4, dtype=bool), info)
        frames, began = torch.from_numpy(info["context_obs"]), torch.from_numpy(info["context_first"])
        _, memory = made.network.remember(frames[:, :-1], began[:, :-1], made.network.initial(4, torch.device("cpu")))
    assert torch.equal(inputs, frames[:, -1])
    assert torch.equal(first, began[:, -1])
    assert torch.allclose(player.memory, memory, atol=1e-5)


def test_worlds_that_begin_anew_while_they_are_played_are_remembered_from_the_frames_before() -> None:
    """And the network reads again what was recorded, other than with memories that are empty there."""
    env, replay, made = blocks(4), Replay(SPACE, 1000), agent(channels=[4, 8], memory=8)
    chance = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    replay.add_segments(rollout(env, chance, 40, EnvState.reset(env, 0)).segments, "random", 0)
    imagined = ImaginedVectorEnv(storm().world(config().sampling), replay, 4, 3, horizon=3)
    player = RecordingPlayer(made.network, FrameReader(), 4, torch.Generator().manual_seed(0))
    data, found = player.play(imagined, 9, EnvState.reset(imagined, 0))
    again = data.first[:, 1:]
    assert again.any()
    assert (data.fresh[:, 1:].abs().sum(-1) > 0)[again].any()
    assert not data.fresh[:, 1:][~again].any()
    with torch.no_grad():
        steps = data.inputs[:, :-1], data.first[:, :-1], data.memory
        _, memory = made.network.remember(*steps, data.fresh[:, :-1])
        _, emptied = made.network.remember(*steps)
    assert torch.allclose(memory, player.memory, atol=1e-5)
    assert not torch.allclose(emptied, player.memory, atol=1e-3)
    rows, contexts = np.flatnonzero(found.env_state.first), found.env_state.info
    frames, began = (torch.from_numpy(contexts[f"context_{name}"][rows]) for name in ("obs", "first"))
    with torch.no_grad():
        _, warmed = made.network.remember(frames[:, :-1], began[:, :-1], torch.zeros(len(rows), 16))
    assert torch.allclose(data.fresh[rows, -1], warmed.masked_fill(began[:, -1:], 0), atol=1e-5)


@torch.no_grad()
def test_a_world_restarted_at_an_episodes_beginning_is_empty() -> None:
    player = agent(**FRAMES).player(2, torch.Generator(), None)
    obs = np.random.default_rng(0).integers(256, size=(2, 3, *SPACE.frame_shape)).astype(np.uint8)
    first = np.array([[True, False, True], [True, False, False]])
    fresh = player._fresh(np.ones(2, dtype=bool), {"context_obs": obs, "context_first": first})
    assert not fresh[0].any()
    assert fresh[1].any()
