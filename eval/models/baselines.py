"""Baselines `copy`, `markov` and `extrapolate`. None of them needs torch."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.models.markov import MarkovTable, build_tables, load_table, table_path
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.template import Context, ContextKind, window_context
from loopwm.records.windows import Window

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class StepPredictor(ABC):
    """Baseline that predicts each horizon by itself."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {}

    @abstractmethod
    def predict_step(self, env: str, context: Context, action: str, ahead: int) -> str:
        """Return the observation after `action`, the `ahead`-th from now (1 is the next)."""

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        return [self._predict_window(window, window_context(window, context_kind), horizons) for window in windows]

    def _predict_window(self, window: Window, context: Context, horizons: Sequence[int]) -> Prediction:
        env, actions = window["env"], window["actions"]
        return Prediction({k: self.predict_step(env, context, actions[k - 1], k) for k in horizons})


class Copy(StepPredictor):
    """Repeat the last observation at every horizon."""

    def predict_step(self, env: str, context: Context, action: str, ahead: int) -> str:
        return context.history[-1].observation if context.history else context.observation


@dataclass(frozen=True)
class Markov(StepPredictor):
    """Predict the most frequent observation after that action string in train episodes. tables: by environment."""

    tables: Mapping[str, MarkovTable]

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {f"markov_{env}_sha256": table.sha256 for env, table in sorted(self.tables.items())}

    def predict_step(self, env: str, context: Context, action: str, ahead: int) -> str:
        return self.tables[env].predict(action)


@dataclass(frozen=True)
class Extrapolate(StepPredictor):
    """Continue numbers in repeated readings linearly; without readings, predict as `markov`.

    The readings of an action are the observations that followed the same action string in the history shown. Used is
    the last run of them that is one text but for its numbers, if it has two readings or more. Each number is fitted by
    least squares against the step it was read at (steps between readings count, whatever they did), continued to the
    predicted step, and rounded to the digits it was printed with. A run without numbers is repeated. The `snapshot`
    and `full` contexts show no history, so there it equals `markov`.
    """

    markov: Markov

    @property
    def identity(self) -> Mapping[str, str | int]:
        return self.markov.identity

    def predict_step(self, env: str, context: Context, action: str, ahead: int) -> str:
        steps, texts = repeated_readings(context, action)
        if len(texts) < 2:
            return self.markov.predict_step(env, context, action, ahead)
        return continue_readings(steps, texts, len(context.history) + ahead)


def repeated_readings(context: Context, action: str) -> tuple[list[int], list[str]]:
    """Return steps (the first observation is step 0) and texts of the action's last readings of one template."""
    readings = [(i, s.observation) for i, s in enumerate(context.history, start=1) if s.action == action]
    if not readings:
        return [], []
    template = _NUMBER.sub("#", readings[-1][1])
    changes = [n for n, (_, text) in enumerate(readings, start=1) if _NUMBER.sub("#", text) != template]
    run = readings[max(changes, default=0) :]
    return [step for step, _ in run], [text for _, text in run]


def continue_readings(steps: Sequence[int], texts: Sequence[str], target: int) -> str:
    """Return the last text with its numbers continued to step `target`. The texts are equal but for their numbers."""
    printed = _NUMBER.findall(texts[-1])
    if not printed:
        return texts[-1]
    values = np.array([_NUMBER.findall(text) for text in texts], dtype=np.float64)
    offsets = np.array(steps, dtype=np.float64) - np.mean(steps)
    slopes = offsets @ values / (offsets @ offsets)
    continued = values.mean(axis=0) + slopes * (target - np.mean(steps))
    numbers = iter(_print_like(value, like) for value, like in zip(continued, printed, strict=True))
    return _NUMBER.sub(lambda _: next(numbers), texts[-1])


def _print_like(value: float, like: str) -> str:
    """Round (halves up) to the number of decimals that `like` has."""
    decimals = len(like.partition(".")[2])
    scale = 10**decimals
    return f"{math.floor(value * scale + 0.5) / scale:.{decimals}f}"


def load_markov(windows: Sequence[Window], train_episodes: Sequence[Path]) -> Markov:
    """Load tables for the environments of the windows, built from train episodes if given, else the committed ones."""
    tables = build_tables(train_episodes) if train_episodes else {}
    for env in sorted({window["env"] for window in windows}):
        if env in tables:
            continue
        if train_episodes or not table_path(env).is_file():
            raise InputError(f"--train-episodes: must hold episodes of {env!r}, which has no markov table")
        tables[env] = load_table(table_path(env))
    return Markov(tables)
