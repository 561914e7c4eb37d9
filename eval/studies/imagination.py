"""Two ways of imagining that only the deferral study needs: decoded text fed back, and very long latent rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.models import MAX_NEW_TOKENS, CheckpointPredictor
from eval.predictors import Prediction
from eval.studies.scores import Values
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


@dataclass(frozen=True)
class LatentNorms:
    """RMS of h_k at the state slots by horizon, from 0 (the encoded context): mean and largest over windows."""

    mean: list[float]
    largest: list[float]


def latent_norms(
    predictor: CheckpointPredictor, windows: Sequence[Window], regime: Regime, last: int, batch_size: int
) -> LatentNorms:
    """Follows the latent for `last` steps in which each window's own actions come again and again."""
    batches = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    norms = np.concatenate([_batch_norms(predictor, batch, regime, last) for batch in batches])
    return LatentNorms(norms.mean(0).tolist(), norms.max(0).tolist())


def _batch_norms(predictor: CheckpointPredictor, windows: Sequence[Window], regime: Regime, last: int) -> Values:
    """(windows, last + 1)."""
    world = predictor.encode(windows, [window_context(window, regime) for window in windows])
    worlds = [world.latent]
    for step in range(last):
        world = predictor.world_model.advance(world, [w["actions"][step % len(w["actions"])] for w in windows])
        worlds.append(world.latent)
    return np.stack([h.float().square().mean((1, 2)).sqrt().cpu().numpy() for h in worlds], axis=1)
