"""What can be evaluated: anything that turns windows into predicted observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from eval.windows import Window
from loopwm.text.format import Regime

OPPONENTS = {"scienceworld": "retrieve-names", "alfworld": "track"}
"""By environment the strongest program without a learned model: what a model's figures are to be read beside."""


@dataclass(frozen=True)
class Prediction:
    """Predicted observations of one window by horizon, and how many history steps did not fit the context."""

    texts: dict[int, str]
    steps_cut: int = 0


class Predictor(Protocol):
    """A model or a floor. It sees of a window only what the regime shows, and its actions."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What else decides the predictions (hashes, depth); part of a run's provenance."""
        ...

    def predict(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> list[Prediction]:
        """One prediction a window. Every window has at least max(horizons) actions and the fields of the regime."""
        ...


@runtime_checkable
class Metered(Protocol):
    """A predictor that costs something to ask."""

    def usage(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> Mapping[str, int | float]:
        """What the predictions of a whole run took, also those made before it was interrupted."""
        ...
