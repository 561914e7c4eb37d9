"""How the size of the latent develops in very long rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.models.checkpoint import CheckpointPredictor
from eval.studies.scores import Values
from loopwm.records.template import Regime
from loopwm.records.windows import Window


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
    world = predictor.begin(windows, regime).world
    worlds = [world.latent]
    for step in range(last):
        world = predictor.world_model.advance(world, [w["actions"][step % len(w["actions"])] for w in windows])
        worlds.append(world.latent)
    return np.stack([h.float().square().mean((1, 2)).sqrt().cpu().numpy() for h in worlds], axis=1)
