"""What can be evaluated: anything that turns windows into predicted observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from eval.scores.predictions import Prediction
from loopwm.records.template import ContextKind
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.records.windows import Window

STRONGEST_BASELINES = {"scienceworld": "retrieve-names", "alfworld": "track"}
"""By environment the strongest program without a learned model: what a model's figures are to be read beside."""


class Predictor(Protocol):
    """A model or a baseline. It sees of a window only what the context shows, and its actions."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What else decides the predictions (hashes, depth); part of a run's provenance."""
        ...

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        """One prediction a window. Every window has at least max(horizons) actions and the fields of the context.

        Raises InputError from a FormatError where a window cannot be rendered: too long for what the model reads. The
        harness then refuses that window and asks again for the others.
        """
        ...


@runtime_checkable
class Trained(Protocol):
    """A checkpoint of ours. training_episodes: what it was trained on, None where nobody knows."""

    @property
    def training_episodes(self) -> TrainingEpisodes | None: ...


@runtime_checkable
class Metered(Protocol):
    """A predictor that costs something to ask."""

    def usage(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> Mapping[str, int | float]:
        """What the predictions of a whole run took, also those made before it was interrupted."""
        ...
