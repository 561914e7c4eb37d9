"""What a training run's `metrics.jsonl` tells about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines

SPIKE_WINDOW = 50
"""Steps before a step that its loss is held against."""
SPIKE_DEVIATIONS = 4.0
MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for normally distributed values."""


@dataclass(frozen=True)
class TrainingFacts:
    """seconds: spent in optimiser steps. dev_loss: teacher-forced nats a token at the last evaluation.
    largest_state_rms: largest RMS of h^(T) in any step. mean_depth: loops of a row."""

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
    """Steps whose loss is above the median of the SPIKE_WINDOW steps before by more than 4 robust deviations.

    The first SPIKE_WINDOW steps are not judged. A loss that is not finite is a spike.
    """
    spikes = 0
    for step in range(SPIKE_WINDOW, len(losses)):
        before = np.array(losses[step - SPIKE_WINDOW : step])
        median = np.median(before)
        deviation = MAD_TO_DEVIATION * np.median(np.abs(before - median))
        spikes += not losses[step] <= median + SPIKE_DEVIATIONS * deviation
    return spikes


def read_training_log(run_folder: Path) -> TrainingFacts:
    """Facts of a run that logs every step. Raises InputError if it never evaluated on dev."""
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
