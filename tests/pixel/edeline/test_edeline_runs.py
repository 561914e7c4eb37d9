"""EDELINE through the front door: training, resuming, bad configurations, agents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.training_config import training_config
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace
from loopwm.training.__main__ import main as train
from tests.pixel.agents.test_agent_trainer import blocks

SPACE = FrameSpace("blocks", "1", (6, 8, 3), 4)
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def config_file(frames, tmp_path_factory):
    memory = {"dim": 32, "heads": 2, "mlp_dim": 64}
    unet = {"channels": [16, 16], "blocks": [1, 1], "condition": 32, "heads": 2}
    config = {
        "system": "edeline",
        "model": {"memory": memory, "unet": unet, "encoder_channels": [8], "action_dim": 8, "head_hidden": 16}
        | {"frames": 2, "burn_in": 2, "rewards": [0.0, 1.0]},
        "data": {"train": str(frames / "train"), "dev": str(frames / "test")},
        "batch": {"rows": 8, "steps": 6},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0, "warmup_steps": 5},
        "run": {"steps": 40, "mixed_precision": "no", "log_every": 1, "eval_every": 40, "save_every": 10},
    }
    path = tmp_path_factory.mktemp("config") / "edeline.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def run(config_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    assert train(["--config", str(config_file), "--out", str(folder)]) == 0
    return folder


def test_training_learns_the_blocks(run):
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(losses[-10:]) < np.mean(losses[:5]) / 1.5


@pytest.mark.slow
def test_an_interrupted_run_ends_as_the_whole_one(run, config_file, tmp_path):
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "parts")]
    assert train([*arguments, "--max-minutes", "0.005"]) == 0
    stopped = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert stopped[-1] < "step-00000040"
    assert train(arguments) == 0
    ours, theirs = (load_checkpoint(folder / "model").state_dict() for folder in (run, tmp_path / "parts"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.frames=3", "model.frames: must be at most burn_in (2), got 3"),
        ("model.unet.channels=[16, 16, 16, 16]", "model.unet.blocks: "),
        ("model.unet={channels: [16, 16, 16], blocks: [1, 1, 1]}", "model.channels: 3 levels and a stem of 1"),
        ("model.encoder_channels=[]", "model.encoder_channels: must have at least one level"),
        ("model.encoder_channels=[8, 8]", "model.encoder_channels: 2 levels and a stem of 1"),
        ("model.memory.kind=gru", "model.memory.kind: unknown key; known: "),
        ("batch.steps=1", "batch.steps: must be at least 3, got 1"),
        ("objective.novelty=2", "objective.novelty: must be between 0 and 1, got 2"),
        ("objective.contrast=-1", "objective.contrast: must be at least 0, got -1"),
        ("objective.preview=1", "model.unet.memory_map: must be at least 1 with objective.preview, got 0"),
        ("model.unet.memory_map=-1", "model.unet.memory_map: must be at least 0, got -1"),
    ],
)
def test_bad_configuration_is_one_line_and_status_2(config_file, tmp_path, capsys, override, message):
    assert train(["--config", str(config_file), "--out", str(tmp_path / "run"), override]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_system_is_refused(run):
    with pytest.raises(InputError, match="system: must be 'twisted', got 'edeline'"):
        load_checkpoint(run / "model", "twisted")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("edeline*.yaml")), ids=lambda path: path.stem)
def test_configurations_in_the_box_can_be_read(path):
    sections = read_sections(path)
    if sections["system"] == "edeline":
        assert training_config(sections).model.burn_in >= training_config(sections).model.frames
    else:
        assert agent_config(sections).of_system == "edeline"


def test_a_configuration_holds_what_table_9_says():
    config = agent_config(read_sections(CONFIGS / "edeline-agent-atari.yaml"))
    m = config.model
    assert (m.frames, m.burn_in, m.memory.dim, m.head_hidden, m.action_dim) == (4, 4, 512, 512, 128)
    assert m.encoder_channels == m.unet.channels == (64, 64, 64, 64)
    assert (m.unet.blocks, m.unet.condition, config.sampling.steps) == ((2, 2, 2, 2), 256, 3)
    assert (config.world.steps, config.world.rows, config.imagination.steps) == (19, 32, 15)
    assert (config.world.learning_rate, config.world.clip_norm, config.real.total) == (1e-4, 1.0, 100_000)
    assert config.world.updates * config.real.total / (config.real.count * config.real.steps) == 400_000


@pytest.mark.parametrize("learner", [{"learner": "ppo", "policy": {"channels": [4], "memory": 8, "hidden": 8}},
                                     {"learner": "actor-critic", "actor_critic": {"channels": [4], "hidden": 8}},
                                     {"learner": "actor-critic", "actor_critic": {"hidden": 8}}],
                         ids=["ppo", "actor-critic", "actor-critic without frames"])  # fmt: skip
def test_an_agent_learns_in_its_imagination(learner, tmp_path):
    sections = {
        "system": "edeline-agent",
        "model": {
            "memory": {"dim": 16, "heads": 2, "mlp_dim": 16},
            "unet": {"channels": [8, 8], "blocks": [1, 1], "condition": 8, "heads": 1},
            "encoder_channels": [4],
            "action_dim": 4,
            "head_hidden": 8,
            "frames": 2,
            "burn_in": 2,
        },
        "real": {"count": 2, "steps": 8, "total": 32, "epochs": 1, "minibatches": 1},
        "world": {"updates": 1, "rows": 4, "steps": 5, "minibatches": 2},
        "imagination": {"updates": 1, "warmup": 8, "count": 2, "steps": 3, "burn_in": 2},
    }
    AgentTrainer(agent_config(sections | learner), blocks(2), SPACE, tmp_path).run()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"world_loss", "imagined_reward"} <= last.keys()
    assert load_checkpoint(tmp_path / "model", "edeline").space == SPACE
