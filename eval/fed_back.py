"""Imagination that decodes every step and takes the text for what was observed. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eval.models import MAX_NEW_TOKENS, CheckpointPredictor
from eval.predictors import Prediction
from eval.windows import Window
from loopwm.text.format import FormatError, Regime, Transition, window_context


class FedBackPredictor(CheckpointPredictor):
    """Decodes every step and takes the text for what was observed, as autoregressive imagination does."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**super().identity, "decode": "fed_back"}

    def predict(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> list[Prediction]:
        contexts = [window_context(window, regime) for window in windows]
        world = self.encode(windows, contexts)
        predictions = [Prediction({}, cut) for cut in world.steps_cut]
        for k in range(1, max(horizons) + 1):
            actions = [window["actions"][k - 1] for window in windows]
            texts = self.world_model.decode(self.world_model.advance(world, actions), MAX_NEW_TOKENS)
            for prediction, text in zip(predictions, texts, strict=True):
                prediction.texts[k] = text
            steps = [Transition(action, text) for action, text in zip(actions, texts, strict=True)]
            contexts = [replace(c, history=(*c.history, step)) for c, step in zip(contexts, steps, strict=True)]
            try:
                world = self.world_model.observe(world, actions, texts)
            except FormatError:  # over the context limit: encoding drops the oldest steps
                world = self.encode(windows, contexts)
        return [Prediction({k: p.texts[k] for k in horizons}, p.steps_cut) for p in predictions]
