"""A new pixel system is a module and a line of the registry: it trains, is kept, imagines and is drawn like others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from loopwm.pixel import registry
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.gym import CATCH
from loopwm.pixel.imagined import Imagined
from loopwm.pixel.program import PixelProgram
from loopwm.pixel.storm.system import StormSampling
from loopwm.pixel.system import PixelSystem, make_system, mean_of
from loopwm.pixel.training_config import training_config
from loopwm.records.errors import InputError
from loopwm.trainer.trainer import Trainer
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_agent_trainer import blocks


@dataclass(frozen=True)
class Sizes:
    width: int = 4
    mu_rec: float = 1.0
    default_depth: int = 1
    max_loops: int = 1


@dataclass(frozen=True)
class Nothing:
    pass


class Still(PixelSystem):
    """A world in which nothing moves; it learns the mean frame and says how far it is from that."""

    name = "still"
    Model, Objective, Sampling = Sizes, Nothing, Nothing

    def __init__(self, config, objective, space):
        super().__init__(config, objective, space)
        self.mean = torch.nn.Parameter(torch.ones(space.frame_shape))
        self.looked = 0

    def loss(self, batch, depth, generator):
        error = (batch.next_obs.float() / 255 - self.mean).square().mean()
        return error, {"loss": mean_of(error, batch.action.numel())}

    def world(self, sampling=None):
        return StillWorld(self)


class StillWorld:
    def __init__(self, system):
        self.system, self.space = system, system.space

    def start(self, obs, action, first, generator):
        return obs[:, -1]

    def observe(self, state, action, obs, first, generator):
        return obs

    def step(self, state, action, generator):
        return Imagined(torch.zeros(len(state)), torch.zeros(len(state), dtype=torch.bool), state)

    def show(self, state):
        self.system.looked += 1
        return state

    def replace(self, state, rows, fresh):
        return state.index_copy(0, rows, fresh)


@pytest.fixture
def still(monkeypatch):
    """Registered by one line, as any other."""
    monkeypatch.setitem(registry.SYSTEMS, "still", f"{__name__}:Still")
    monkeypatch.setitem(registry.AGENTS, "still-agent", "still")


def test_a_registered_system_trains_and_is_saved(still, frames, tmp_path):
    sections = {
        "system": "still",
        "model": {"width": 2},
        "data": {"train": str(frames / "train"), "dev": str(frames / "test")},
        "batch": {"rows": 4, "steps": 3},
        "optimizer": {"name": "adamw", "warmup_steps": 1, "learning_rate": 0.1, "weight_decay": 0.0},
        "run": {"steps": 20, "eval_every": 20, "log_every": 1, "mixed_precision": "no"},
    }
    Trainer(training_config(sections), PixelProgram, tmp_path / "run").run()
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    assert load_checkpoint(tmp_path / "run" / "model").config == Sizes(width=2)


def test_an_agent_learns_in_a_registered_system(still, tmp_path):
    sections = {
        "system": "still-agent",
        "policy": {"channels": [4], "memory": 8, "hidden": 8},
        "real": {"count": 2, "steps": 8, "total": 32, "epochs": 1, "minibatches": 1},
        "world": {"updates": 1, "rows": 2, "steps": 3, "minibatches": 1},
        "imagination": {"updates": 1, "warmup": 8, "count": 2, "steps": 3, "burn_in": 2},
    }
    trainer = AgentTrainer(agent_config(sections), blocks(2), SPACE, tmp_path)
    trainer.run()
    assert trainer.world.system.looked == 2 * 3
    assert load_checkpoint(tmp_path / "model", "still").name == "still"


@pytest.mark.parametrize("read", [training_config, agent_config])
def test_a_system_that_is_not_registered_is_refused_by_name(read):
    with pytest.raises(InputError, match=r"system: must be one of .*, got 'dreamer'"):
        read({"system": "dreamer"})


def test_a_learner_that_is_not_registered_is_refused_by_name():
    with pytest.raises(InputError, match=r"learner: must be one of .*, got 'sarsa'"):
        agent_config({"system": "twisted-agent", "learner": "sarsa"})


def test_worlds_of_a_checkpoint_are_stepped_as_it_says(tmp_path):
    system = load_checkpoint(CATCH)
    assert "sampling" not in json.loads((CATCH / "config.json").read_text())
    system.sampling = StormSampling(latents="mode")
    save_checkpoint(system, tmp_path / "model")
    again = load_checkpoint(tmp_path / "model")
    assert again.sampling == system.sampling

    def frames(world, seed):
        generator, action = torch.Generator().manual_seed(seed), torch.zeros(32, dtype=torch.int64)
        obs = torch.randint(0, 256, (32, 1, 10, 5, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        state = world.start(obs, action[:, None][:, :0], torch.ones(32, 1, dtype=torch.bool), generator)
        return world.show(world.step(state, action, generator).state)

    assert torch.equal(frames(again.world(), 1), frames(again.world(), 2))
    assert not torch.equal(frames(again.world(StormSampling()), 1), frames(again.world(StormSampling()), 2))


def test_a_checkpoint_of_another_system_is_refused(still, tmp_path):
    save_checkpoint(make_system("still", Sizes(), Nothing(), SPACE), tmp_path / "model")
    with pytest.raises(InputError, match="system: must be 'twisted', got 'still'"):
        load_checkpoint(tmp_path / "model", "twisted")
    config = tmp_path / "model" / "config.json"
    record = json.loads(config.read_text())
    for change, message in (
        ({"system": "other"}, "system: must be one of .*, got 'other'"),
        ({"model": {}}, "model.*: missing"),
    ):
        config.write_text(json.dumps(record | change))
        with pytest.raises(InputError, match=message) as caught:
            load_checkpoint(tmp_path / "model")
        assert str(caught.value).startswith(str(tmp_path / "model"))
        assert yaml.safe_load(config.read_text()) == record | change


@pytest.mark.parametrize("name", registry.SYSTEMS)
def test_a_system_is_named_by_its_own_module_and_one_line_of_the_registry(name):
    root = Path(__file__).parents[2]
    home = registry.SYSTEMS[name].partition(":")[0]
    package = ".".join(home.split(".")[:3])
    found = {}
    for path in [*(root / "loopwm").rglob("*.py"), *(root / "eval").rglob("*.py")]:
        place = path.relative_to(root)
        inside = ".".join(place.with_suffix("").parts).startswith(package)
        count = path.read_text(encoding="utf-8").count(package)
        if count and not inside:
            found[str(place)] = count
    assert found == {"loopwm/pixel/registry.py": 1}
