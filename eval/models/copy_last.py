"""Baseline `copy`. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.scores.predictions import Prediction
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import Window


class Copy:
    """Repeat the last observation at every horizon."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        contexts = [window_context(window, context_kind) for window in windows]
        last = [context.history[-1].observation if context.history else context.observation for context in contexts]
        return [Prediction(dict.fromkeys(horizons, text)) for text in last]
