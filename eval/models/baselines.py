"""Baselines `copy` and `markov`. Neither needs torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.models.markov import MarkovTable, build_tables, load_table, table_path
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.template import Context, ContextKind, window_context
from loopwm.records.windows import Window


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
