"""Training runs of a study: one subprocess each, skipped when finished, several in parallel."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.studies.study_protocol import Protocol
from loopwm.pixel.training_config import PixelTrainingConfig
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines
from loopwm.text.training.config import TrainingConfig


@dataclass(frozen=True)
class TrainingRun:
    """Training run: its folder and the arguments of the training program."""

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


def make_run(protocol: Protocol, out: Path, arm: str, seed: int, rate: float | None = None) -> TrainingRun:
    """Return the run of an arm. A rate of None keeps the configuration's."""
    folder = out / arm / f"seed-{seed}" if rate is None else out / arm / f"rate-{rate:g}" / f"seed-{seed}"
    overrides, config = protocol.overrides(arm, seed, rate), protocol.config(arm, seed, rate)
    return TrainingRun(arm, seed, rate, folder, Path(protocol.base), overrides, config)


@contextmanager
def locked(run: TrainingRun) -> Iterator[int]:
    """Lock the run's folder; wait for a process of a killed study that still uses it.

    Yields the file descriptor that holds the lock while any process keeps it open.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.folder.with_name(f"{run.folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def train(run: TrainingRun) -> None:
    """Train the run to its end, resuming it if necessary. The caller must not hold the lock.

    Raises:
        InputError: training fails
    """
    with locked(run) as lock:
        if finished(run):
            return
        command = [sys.executable, "-m", "loopwm.training", "--config", str(run.base), "--out", str(run.folder)]
        print(f"training {run.folder}", file=sys.stderr)
        status = subprocess.run([*command, *run.overrides], pass_fds=(lock,), check=False).returncode
    if status:
        raise InputError(f"{run.folder}: training ended with status {status}")


def finished(run: TrainingRun) -> bool:
    """Return True if the run has its last checkpoint and the exported model.

    Raises:
        InputError: the folder is another run's
    """
    if not (run.folder / "config.yaml").is_file():
        return False
    recorded = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    if recorded != json.loads(json.dumps(dataclasses.asdict(run.config))):
        raise InputError(f"--out: {run.folder} contains a run of another configuration; choose another folder")
    last = run.folder / "checkpoints" / f"step-{run.config.run.steps:08d}"
    return last.is_dir() and (run.model / "config.json").is_file()


def best_run(runs: Sequence[TrainingRun]) -> TrainingRun:
    """Return the finished run of lowest final dev loss."""
    facts = [(read_training_log(run.folder), run) for run in runs]
    return min(facts, key=lambda pair: math.inf if pair[0].diverged else pair[0].dev_loss)[1]


def in_processes(work: Callable[[Any], None], items: Sequence[Any], workers: int) -> None:
    """Run work(item) for every item, `workers` in parallel, each in its own process if there are several.

    Raises:
        InputError: one fails; the others are completed first
    """
    if workers == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda item: _in_process(work, item), items))


def _in_process(work: Callable[[Any], None], item: Any) -> None:
    process = get_context("spawn").Process(target=work, args=(item,))
    process.start()
    process.join()
    if process.exitcode:
        raise InputError(f"a process of the study ended with status {process.exitcode}; its message is above")


SPIKE_WINDOW = 50
"""Preceding steps that a step's loss is compared with."""
SPIKE_DEVIATIONS = 4.0
MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for normally distributed values."""


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a training run.

    seconds: in optimiser steps
    dev_loss: teacher-forced nats per token at the last evaluation
    largest_state_rms: largest RMS of h^(T) in any step
    mean_depth: mean loops per row
    """

    steps: int
    tokens: float
    seconds: float
    dev_loss: float
    spikes: int
    largest_state_rms: float
    mean_depth: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.dev_loss)


def count_spikes(losses: Sequence[float]) -> int:
    """Count steps whose loss exceeds the median of the preceding SPIKE_WINDOW steps by 4 robust deviations.

    The first SPIKE_WINDOW steps are skipped. A loss that is not finite is a spike.
    """
    spikes = 0
    for step in range(SPIKE_WINDOW, len(losses)):
        before = np.array(losses[step - SPIKE_WINDOW : step])
        median = np.median(before)
        deviation = MAD_TO_DEVIATION * np.median(np.abs(before - median))
        spikes += not losses[step] <= median + SPIKE_DEVIATIONS * deviation
    return spikes


def read_training_log(run_folder: Path) -> TrainingFacts:
    """Read the facts of a run that logs every step.

    Raises:
        InputError: the run has no dev evaluation
    """
    metrics = run_folder / "metrics.jsonl"
    train, dev = _records(metrics, "train"), _records(metrics, "dev")
    if not train or not dev:
        raise InputError(f"{metrics}: holds no {'dev' if train else 'train'} record")
    return TrainingFacts(
        steps=train[-1]["step"],
        tokens=sum(r["tokens"] for r in train),
        seconds=sum(r["tokens"] / r["tokens_per_s"] for r in train),
        dev_loss=dev[-1]["loss"],
        spikes=count_spikes([r["loss"] for r in train]),
        largest_state_rms=max(r["state_rms"] for r in train),
        mean_depth=sum(r["mean_depth"] for r in train) / len(train),
    )


def _records(metrics: Path, kind: str) -> list[dict[str, Any]]:
    return [record for _, record in read_json_lines(metrics) if record["kind"] == kind]
