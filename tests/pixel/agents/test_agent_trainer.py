"""Acting in real and imagined worlds, and the loop that learns from both."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.torch import load_file

from loopwm.pixel.agents.agent_trainer import AgentTrainer, WorldLearner, in_unit
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.agents.ppo_learner import RolloutCollector, play
from loopwm.pixel.agents.ppo_policy import ActorCritic, PolicyConfig
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.imagined import EnvState, ImaginedVectorEnv
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from loopwm.records.frames import write_episode
from tests.fixtures.blocks import COLUMNS, MOVES, PATCH, ROWS, SPACE, drawn
from tests.fixtures.blocks import played as demonstrated

SMALL = PolicyConfig(channels=(4, 8), memory=16, hidden=32)


class Blocks(gymnasium.Env):
    """The blocks as an environment; truncated after 7 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, SPACE.frame_shape, np.uint8)
    action_space = gymnasium.spaces.Discrete(SPACE.actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.age = self.np_random.integers((ROWS, COLUMNS)), 0
        return drawn(self.place, (2, 3)), {}

    def step(self, action):
        self.place, self.age = (self.place + MOVES[int(action)]) % (ROWS, COLUMNS), self.age + 1
        there = tuple(self.place) == (0, 0)
        return drawn(self.place, (2, 3)), float(there), there, not there and self.age >= 7, {}


def blocks(count):
    return SyncVectorEnv([Blocks] * count, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return ActorCritic(SMALL, SPACE.frame_shape, SPACE.actions)


def config(**changes):
    sections = {
        "model": {"codes": 8, "dim": 32, "heads": 2, "mlp_dim": 64, "mu_rec": 2.0, "default_depth": 2, "max_loops": 4}
        | {"patch": [PATCH, PATCH]},
        "policy": {"channels": [4, 8], "memory": 16, "hidden": 32},
        "real": {"count": 4, "steps": 8, "total": 128, "epochs": 1, "minibatches": 2},
        "world": {"updates": 2, "rows": 4, "steps": 6, "minibatches": 2},
        "imagination": {
            "updates": 2,
            "warmup": 32,
            "count": 4,
            "steps": 5,
            "burn_in": 3,
        },
        "sampling": {"decoder": {"kind": "sample"}},
        "run": {"save_every": 1},
    }
    for section, values in changes.items():
        sections[section] = sections[section] | values
    return agent_config({"system": "twisted-agent", **sections})


def test_what_is_recorded_is_what_the_policy_computes_again(policy):
    """Memories, values and log-probabilities of a rollout with resets and truncations equal those of a whole pass."""
    player = RolloutCollector(policy, 4, torch.Generator().manual_seed(0))
    env = blocks(4)
    env_state = EnvState.reset(env, seed=0)
    for _ in range(2):
        data, found = play(env, player, 10, env_state)
        env_state = found.env_state
        with torch.no_grad():
            out = policy(data.obs, data.first, data.memory, data.fresh)
        assert torch.allclose(out.value, data.value, atol=1e-5)
        log_p = out.logits.log_softmax(-1).gather(-1, data.action[..., None])[..., 0]
        assert torch.allclose(log_p, data.log_p, atol=1e-5)
        inside = ~(data.terminated | data.truncated)[:, :-1]
        assert torch.allclose(data.next_value[:, :-1][inside], data.value[:, 1:][inside])
        assert data.truncated[:, :-1].any()
    with torch.no_grad():
        last = policy.step(torch.from_numpy(found.segments.next_obs[:, -1]), out.memory).value
    goes_on = ~data.terminated[:, -1]
    assert torch.allclose(data.next_value[:, -1][goes_on], last[goes_on], atol=1e-5)


def test_a_truncated_episode_is_judged_by_its_own_last_frame(policy):
    player = RolloutCollector(policy, 4, torch.Generator().manual_seed(0))
    env = blocks(4)
    data, found = play(env, player, 10, EnvState.reset(env, seed=0))
    b, t = (int(x[0]) for x in data.truncated[:, :-1].nonzero(as_tuple=True))
    start = int(data.first[b, : t + 1].nonzero()[-1])
    memory = policy.initial(1, torch.device("cpu"))
    with torch.no_grad():
        for step in range(start, t + 1):
            memory = policy.step(data.obs[b : b + 1, step], memory).memory
        expected = policy.step(torch.from_numpy(found.segments.next_obs[b : b + 1, t]), memory).value
    assert torch.allclose(data.next_value[b, t], expected[0], atol=1e-5)


def test_memories_of_imagined_worlds_are_warmed_up_on_the_frames_before(policy, tmp_path):
    trainer = AgentTrainer(config(imagination={"updates": 0}), blocks(4), SPACE, tmp_path)
    trainer.run()
    env = ImaginedVectorEnv(trainer.world.world(), trainer.replay, 4, 3, 6)
    obs, info = env.reset(seed=0)
    player = RolloutCollector(policy, 4, torch.Generator())
    player(obs, np.ones(4, dtype=bool), info)
    frames, began = torch.from_numpy(info["context_obs"]), torch.from_numpy(info["context_first"])
    assert began[:, 1:].any()
    with torch.no_grad():
        memory = policy.initial(4, torch.device("cpu"))
        for t in range(3):
            memory = policy.step(frames[:, t], memory.masked_fill(began[:, t, None], 0)).memory
    assert torch.allclose(player.memory, memory, atol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent") / "run"
    AgentTrainer(config(), blocks(4), SPACE, folder).run()
    return folder


def test_the_loop_imagines_after_its_warm_up_and_not_before(finished):
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [record["interactions"] for record in records] == [32, 64, 96, 128]
    assert ["imagined_reward" in record for record in records] == [False, True, True, True]
    assert all({"world_loss", "real_entropy", "real_reward", "real_ends"} <= record.keys() for record in records)
    assert (finished / "learner.pt").is_file()
    assert (finished / "model" / "config.json").is_file()


def test_a_resumed_run_goes_on_from_all_that_was_saved(tmp_path):
    first = AgentTrainer(config(), blocks(4), SPACE, tmp_path)
    first.run(max_minutes=0.0001)
    state = first.state_dict()
    again = AgentTrainer(config(), blocks(4), SPACE, tmp_path)
    restored = again.state_dict()
    assert restored["counts"] == state["counts"]
    assert 0 < state["counts"][1] < 128
    for name in ("policy", "scale"):
        pairs = ((restored["learner"][name][key], value) for key, value in state["learner"][name].items())
        assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)
    assert all(torch.equal(restored["world"]["model"][k], v) for k, v in state["world"]["model"].items())
    assert restored["world"]["updates"] == state["world"]["updates"]
    assert restored["replay"] == state["replay"]
    assert torch.equal(restored["generator"], state["generator"])
    again.run()
    assert [json.loads(line)["interactions"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        32, 64, 96, 128,
    ]  # fmt: skip


def test_stopped_run_has_agent_and_world_of_its_last_save(tmp_path):
    trainer = AgentTrainer(config(run={"save_every": 2}), blocks(4), SPACE, tmp_path)
    iterate, states = trainer._iterate, []

    def interrupted():
        states.append(copy.deepcopy(trainer.state_dict()))
        if len(states) == 4:
            raise KeyboardInterrupt
        return iterate()

    trainer._iterate = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    learner = torch.load(tmp_path / "learner.pt", weights_only=False)
    assert all(torch.equal(learner["policy"][key], value) for key, value in states[2]["learner"]["policy"].items())
    world = load_checkpoint(tmp_path / "model").state_dict()
    assert all(torch.equal(world[key], value) for key, value in states[2]["world"]["model"].items())


def test_ppo_alone_needs_no_world(tmp_path):
    AgentTrainer(config(world={"updates": 0}, imagination={"updates": 0}), blocks(4), SPACE, tmp_path).run()
    assert not (tmp_path / "model").exists()


def test_a_folder_of_another_configuration_is_refused(finished):
    with pytest.raises(InputError, match="belongs to another configuration"):
        AgentTrainer(config(run={"seed": 1}), blocks(4), SPACE, finished)


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("twisted-agent-*.yaml")), ids=lambda path: path.stem)
def test_configurations_in_the_box_can_be_read(path):
    assert agent_config(read_sections(path)).sampling.decoder.kind == "noised-transport"


@pytest.mark.parametrize(
    ("key", "classic", "craftax", "minatar"),
    [
        ("real.count", 48, 16, 48),
        ("world.replay", 128_000, 48_000, 128_000),
        ("world.updates", 500, 500, 2000),
        ("imagination.updates", 300, 300, 2000),
        ("imagination.warmup", 50_000, 50_000, 200_000),
        ("imagination.entropy_coef", 0.01, 0.01, 0.05),
        ("sampling.decoder.c_d", 0.6, 0.6, 0.2),
        ("sampling.decoder.c_w", 0.3, 0.3, 0.05),
        ("objective.done_coef", 1.0, 1.0, 10.0),
        ("ppo.gamma", 0.925, 0.925, 0.95),
        ("ppo.td_lambda", 0.625, 0.625, 0.75),
        ("ppo.target_discount", 0.95, 0.95, 0.925),
    ],
)
def test_configurations_hold_what_tables_11_and_12_say_of_each_environment(key, classic, craftax, minatar):
    names = ("craftax-classic", "craftax", "minatar")
    found = [agent_config(read_sections(CONFIGS / f"twisted-agent-{name}.yaml")) for name in names]
    assert [attrgetter(key)(config) for config in found] == [classic, craftax, minatar]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"real": {"minibatches": 5}}, "real.minibatches: must be at most 4 rows, got 5"),
        ({"imagination": {"burn_in": 0}}, "imagination.burn_in: must be above 0, got 0"),
        ({"policy": {"channels": []}}, "policy.channels: "),
        ({"world": {"recency": [0.5, 0.6]}}, r"world.recency: must be shares that sum to 1, got \(0.5, 0.6\)"),
    ],
)
def test_bad_configuration_names_its_key(changes, message):
    with pytest.raises(InputError, match=message):
        config(**changes)


def test_an_agent_whose_world_diverges_ends_with_its_last_checkpoint(tmp_path):
    trainer = AgentTrainer(config(world={"learning_rate": 1e30}), blocks(4), SPACE, tmp_path)
    with pytest.raises(InputError, match=r"update \d+: loss is (nan|inf); lower world.learning_rate"):
        trainer.run()
    assert not (tmp_path / "model").exists()


def test_imagination_without_a_world_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"imagination.updates: requires a world"):
        AgentTrainer(config(world={"updates": 0}), blocks(4), SPACE, tmp_path)


def test_signs_of_rewards_reach_learner_and_world_alike(tmp_path):
    env = in_unit(blocks(4), "sign")
    step = env.env.step

    def paid(actions):
        obs, reward, *rest = step(actions)
        return (obs, reward * 7 - 3, *rest)

    env.env.step = paid
    trainer = AgentTrainer(config(imagination={"updates": 0}), env, SPACE, tmp_path)
    trainer.run()
    rewards = trainer.replay.sample(8, 6, np.random.default_rng(0)).reward
    assert set(np.unique(rewards)) == {-1.0, 1.0}
    assert set(trainer.learner._played.reward.unique().tolist()) <= {-1.0, 1.0}


def shown(folder, **changes):
    """A folder of one demonstration of the blocks."""
    folder.mkdir()
    write_episode(folder / "a.npz", replace(demonstrated(7), **changes))
    return str(folder)


def test_demonstrations_are_in_the_replay_from_the_beginning_and_once(tmp_path):
    folder = shown(tmp_path / "shown", reward=np.full(len(demonstrated(7)), -3, np.float32))
    settings = config(world={"demonstrations": folder}, real={"rewards": "sign"})
    trainer = AgentTrainer(settings, blocks(4), SPACE, tmp_path / "run")
    assert [episode.reward.tolist() for episode in trainer.replay.episodes()] == [[-1.0] * len(demonstrated(7))]
    trainer.run(max_minutes=0.0001)
    again = AgentTrainer(settings, blocks(4), SPACE, tmp_path / "run")
    assert sum((episode.reward == -1).all() for episode in again.replay.episodes()) == 1


def test_segments_go_on_from_a_demonstration_that_ended_to_the_next(tmp_path):
    folder = Path(shown(tmp_path / "shown"))
    write_episode(folder / "b.npz", demonstrated(7))
    settings = config(world={"demonstrations": str(folder)})
    replay = AgentTrainer(settings, blocks(4), SPACE, tmp_path / "run").replay
    assert replay.sample(20, 9, np.random.default_rng(0)).first[:, 1:].any()


def test_a_demonstration_of_another_environment_and_more_than_are_kept_are_refused(tmp_path):
    other = shown(tmp_path / "other", space=replace(SPACE, env="other"))
    with pytest.raises(InputError, match=r"other/a.npz: env is 'other', expected"):
        AgentTrainer(config(world={"demonstrations": other}), blocks(4), SPACE, tmp_path / "run")
    good = shown(tmp_path / "good")
    with pytest.raises(InputError, match=r"world.replay: 3 transitions are too few for"):
        AgentTrainer(config(world={"demonstrations": good, "replay": 3}), blocks(4), SPACE, tmp_path / "full")


def test_a_world_that_is_begun_with_and_not_updated_is_imagined_in_as_it_is(finished, tmp_path):
    begun = load_checkpoint(finished / "model")
    begun.take_prepared({"codes": begun.prepared()["codes"][:2]})  # real play shows others
    model = tmp_path / "begun" / "model"
    save_checkpoint(begun, model)
    AgentTrainer(config(world={"updates": 0, "start_from": str(model)}), blocks(4), SPACE, tmp_path).run()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["imagined_reward" in record for record in records] == [False, True, True, True]
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, model.parent))
    assert any(name.startswith("prepared.") for name in theirs), "a codebook, which does not grow either"
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    settings = config(world={"updates": 0, "start_from": str(model)})
    assert settings.has_world
    assert load_checkpoint(tmp_path / "model", settings.of_system).world(settings.sampling) is not None


def test_a_world_that_is_begun_with_is_updated_from_where_it_was(finished, tmp_path):
    settings = config(world={"start_from": str(finished / "model")})
    trained = load_checkpoint(finished / "model").state_dict()
    begun = AgentTrainer(settings, blocks(4), SPACE, tmp_path).world
    assert all(torch.equal(value, trained[name]) for name, value in begun.system.state_dict().items())
    assert begun.system.training


def test_a_world_of_another_model_or_environment_is_refused_by_the_key_that_differs(finished, tmp_path):
    begun = {"world": {"start_from": str(finished / "model")}}
    with pytest.raises(InputError, match=r"model.dim: must be 32 as in world.start_from .*model, got 64"):
        AgentTrainer(config(model={"dim": 64}, **begun), blocks(4), SPACE, tmp_path)
    with pytest.raises(InputError, match=r"real\.environment: env is 'other', expected"):
        AgentTrainer(config(**begun), blocks(4), replace(SPACE, env="other"), tmp_path)


def test_a_part_of_the_rows_is_an_optimiser_step(tmp_path):
    settings = config(world={"minibatches": 4})
    trainer = AgentTrainer(config(world={"minibatches": 4}, imagination={"updates": 0}), blocks(4), SPACE, tmp_path)
    trainer._learn_from_real_play()
    world = WorldLearner(settings, SPACE, torch.device("cpu"))
    world.system.take_prepared(trainer.world.system.prepared())
    world.update(trainer.replay, np.random.default_rng(0))
    assert {int(state["step"]) for state in world.optimizer.state.values()} == {4}


def test_a_segment_too_short_for_the_system_is_refused(tmp_path):
    trainer = config()
    learner = WorldLearner(trainer, SPACE, torch.device("cpu"))
    type(learner.system).shortest = 9
    try:
        with pytest.raises(InputError, match=r"world\.steps: must be at least 9, got 6"):
            WorldLearner(trainer, SPACE, torch.device("cpu"))
    finally:
        type(learner.system).shortest = 1
