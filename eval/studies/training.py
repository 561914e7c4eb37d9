"""Training the runs of a study: each a subprocess of the training program, skipped when finished."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from eval.studies.protocol import Decoding, Protocol, arm_config, arm_overrides
from eval.studies.training_log import read_training_log
from loopwm.pixel.training_config import PixelTrainingConfig
from loopwm.records.errors import InputError
from loopwm.records.template import Regime
from loopwm.text.training_config import TrainingConfig


@dataclass(frozen=True)
class Run:
    """One training: its folder, and how the training program is called for it."""

    arm: str
    seed: int
    rate: float | None
    folder: Path
    base: Path
    overrides: tuple[str, ...]
    config: TrainingConfig | PixelTrainingConfig

    @property
    def model(self) -> Path:
        return self.folder / "model"


@dataclass(frozen=True)
class Job:
    """One arm with one seed, to be trained and scored. Arms that share models share the run."""

    protocol: Protocol
    arm: str
    run: Run

    @property
    def decode(self) -> Decoding:
        return self.protocol.arms[self.arm].decode

    @property
    def follows_latents(self) -> bool:
        return self.protocol.latent_horizon > 0 and self.arm == self.run.arm

    def scores(self, regime: Regime) -> Path:
        return self.run.folder / "eval" / self.arm / regime

    def latents(self, regime: Regime) -> Path:
        return self.run.folder / "eval" / f"latents-{regime}.json"


def make_run(protocol: Protocol, out: Path, arm: str, seed: int, rate: float | None) -> Run:
    """The run of a trained arm. A rate of None is the configuration's own."""
    folder = out / arm / f"seed-{seed}" if rate is None else out / arm / f"rate-{rate:g}" / f"seed-{seed}"
    overrides = tuple(arm_overrides(protocol, arm, seed, rate))
    return Run(arm, seed, rate, folder, Path(protocol.base), overrides, arm_config(protocol, arm, seed, rate))


@contextmanager
def locked(run: Run) -> Iterator[int]:
    """Holds the run's folder: a process that outlives a killed study still has it, and the next one waits for that.

    Yields the file descriptor that holds the lock as long as any process keeps it open.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.folder.with_name(f"{run.folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def train(run: Run) -> None:
    """Trains the run to its end, from where it was left. Raises InputError if that fails.

    The caller holds no lock.
    """
    with locked(run) as lock:
        if finished(run):
            return
        command = [sys.executable, "-m", "loopwm.training", "--config", str(run.base), "--out", str(run.folder)]
        print(f"training {run.folder}", file=sys.stderr)
        status = subprocess.run([*command, *run.overrides], pass_fds=(lock,), check=False).returncode
    if status:
        raise InputError(f"{run.folder}: training ended with status {status}")


def finished(run: Run) -> bool:
    """Whether the run has its last checkpoint and the exported model. Raises InputError for another run's folder."""
    if not (run.folder / "config.yaml").is_file():
        return False
    found = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    if found != json.loads(json.dumps(dataclasses.asdict(run.config))):
        raise InputError(f"--out: {run.folder} holds a run of another configuration; choose another folder")
    last = run.folder / "checkpoints" / f"step-{run.config.run.steps:08d}"
    return last.is_dir() and (run.model / "config.json").is_file()


def best_run(runs: Sequence[Run]) -> Run:
    """The finished run of lowest final dev loss."""
    facts = [(read_training_log(run.folder), run) for run in runs]
    return min(facts, key=lambda pair: math.inf if pair[0].diverged else pair[0].dev_loss)[1]
