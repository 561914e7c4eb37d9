"""Predictors: anything that turns windows into predicted observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from eval.scores.predictions import Prediction
from loopwm.records.template import Context, ContextKind, window_context
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.records.windows import Window

STRONGEST_BASELINES = {"scienceworld": "retrieve-names", "alfworld": "track"}
"""By environment, the best predictor without a learned model: compare a model's figures with it."""


class Predictor(Protocol):
    """Model or baseline. It is shown only what the context shows of a window, and its actions."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """Return what else decides the predictions (hashes, depth), for a run's provenance."""

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        """Return one prediction a window. Windows have at least max(horizons) actions and the fields of the context.

        Raises InputError from a FormatError for a window that cannot be rendered because it is too long. The harness
        then refuses that window and predicts the others again.
        """


@runtime_checkable
class Trained(Protocol):
    """Checkpoint of ours. training_episodes: the episodes it was trained on, None if unknown."""

    @property
    def training_episodes(self) -> TrainingEpisodes | None: ...

    def count_foreign(self, windows: Sequence[Window]) -> int:
        """Count the windows that are worded unlike every training episode."""


@runtime_checkable
class Metered(Protocol):
    """Predictor whose requests cost tokens."""

    def usage(self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]) -> Mapping[str, int]:
        """Return the cost of all predictions of a run, including those before an interruption."""


class WindowBaseline(ABC):
    """Predictor that answers each window by itself."""

    @classmethod
    def load(cls, windows: Sequence[Window], train_episodes: Sequence[Path]) -> Self:
        """Load the baseline for these windows. Raises InputError for windows that it cannot predict."""
        return cls()

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        predictions = []
        for window in windows:
            context = window_context(window, context_kind)
            predictions.append(Prediction(self.answers(context, window["env"], window["actions"], horizons)))
        return predictions

    @abstractmethod
    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        """Return the observation after the first k of the actions for each horizon k."""


class Copy(WindowBaseline):
    """Repeat the last observation at every horizon."""

    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        last = context.history[-1] if context.history else context
        return dict.fromkeys(horizons, last.observation)
