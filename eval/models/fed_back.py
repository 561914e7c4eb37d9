"""Checkpoints that decode every step and take the text for what was observed. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.models.checkpoint import MAX_NEW_TOKENS, CheckpointPredictor
from eval.models.imagination import Imagined, longer
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.template import Context, FormatError, Regime, window_context
from loopwm.records.windows import Window


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
            contexts = [longer(*step) for step in zip(contexts, actions, texts, strict=True)]
            try:
                world = self.world_model.observe(world, actions, texts)
            except FormatError:  # over the context limit: encoding drops the oldest steps
                world = self.encode(windows, contexts)
        return [Prediction({k: p.texts[k] for k in horizons}, p.steps_cut) for p in predictions]


class CheckpointImagination:
    """A checkpoint as an agent's world: every step encodes what was seen and imagined so far."""

    def __init__(self, predictor: CheckpointPredictor) -> None:
        self._depth = predictor.depth
        self._model = predictor.world_model
        self.judges: bool = self._model.model.config.prediction_heads

    def imagine(self, env: str, contexts: Sequence[Context], actions: Sequence[str]) -> list[Imagined]:
        try:
            world = self._model.advance(self._model.encode(contexts, self._depth), actions)
        except FormatError as error:
            raise InputError(f"--context: {error}") from error
        texts = self._model.decode(world, MAX_NEW_TOKENS)
        if not self.judges:
            return [Imagined(text) for text in texts]
        ahead = self._model.predictions(world)
        judged = zip(texts, ahead.reward.tolist(), ahead.continuation.tolist(), strict=True)
        return [Imagined(*step) for step in judged]
