"""A toy study whose one real training run is shared: other arms and seeds are copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from lab.studies.study_protocol import load_protocol
from lab.studies.text_protocol import TextProtocol
from lab.studies.training_runs import TrainingRun, make_run, train
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow

Pretend = Callable[[TrainingRun], None]


@pytest.fixture(scope="session")
def windows_file(make_window: MakeWindow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def window(i: int) -> Window:
        history = [(None, "Start."), *((f"go to room {n}", f"You are in room {n}.") for n in range(i))]
        return make_window(f"w{i}", history, family=("Boil", "Melt")[i % 2])

    path = tmp_path_factory.mktemp("windows") / "dev.jsonl"
    path.write_text("".join(json.dumps(window(i)) + "\n" for i in range(5)))
    return path


@pytest.fixture(scope="session")
def protocol_file(config_file: Path, windows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("protocol") / "toy.yaml"
    protocol = {
        "question": "Is a toy a toy?",
        "base": str(config_file),
        "shared": ["run.steps=2", "run.eval_every=1"],
        "arms": {
            "plain": {},
            "flat": {"overrides": ["model.overrides={max_loops: 1, mu_rec: 1.0, default_depth: 1}"]},
            "fed": {"trained_as": "plain", "decode": "fed_back"},
        },
        "reference": "plain",
        "windows": str(windows_file),
        "seeds": [0, 1],
        "horizons": [1, 3],
        "batch_size": 2,
        "latent_horizon": 3,
    }
    path.write_text(yaml.safe_dump(protocol, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def protocol(protocol_file: Path) -> TextProtocol:
    return load_protocol(TextProtocol, protocol_file)


@pytest.fixture(scope="session")
def trained(protocol: TextProtocol, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The one run that the training program really makes."""
    run = make_run(protocol, tmp_path_factory.mktemp("study"), "plain", 0, None)
    train(run)
    return run


@pytest.fixture
def pretend(trained: TrainingRun) -> Pretend:
    """Stands in for training: the folder of the real run, under the configuration of another."""

    def train_(run: TrainingRun) -> None:
        if not run.folder.exists():
            shutil.copytree(trained.folder, run.folder)
            (run.folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(run.config)))))

    return train_
