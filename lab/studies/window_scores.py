"""Scores of one model on a study's windows: exact match and F1 of decoded text, and teacher-forced loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.commands.harness import RunSettings, evaluate, plan_batches, sample_windows
from eval.models.base import Predictor
from eval.models.checkpoint import CheckpointPredictor
from eval.scores.intervals import Values
from eval.scores.metrics import exact_match, token_f1
from eval.scores.predictions import append_lines, drop_torn_line, read_records
from eval.scores.suites import Suite
from lab.studies.teacher_forcing import nll_of_rows
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import Window, check_runnable
from loopwm.text.world import World

NATS = "nats.jsonl"
Scores = dict[str, Values]
"""By metric, (windows, horizons), windows in the order given: `em`, `f1` and `nats` (of an observation with its end,
teacher-forced). The last is absent where no such loss is defined."""


def select_windows(suite: Suite, settings: RunSettings) -> list[Window]:
    """Return the windows of a run that must score all of them.

    Raises InputError as `sample_windows` does, and for a window that lacks what the context shows.
    """
    windows = sample_windows(suite, settings)
    check_runnable(windows, settings.context, settings.horizons)
    return windows


def score(predictor: Predictor, suite: Suite, windows: Sequence[Window], settings: RunSettings, out: Path) -> None:
    """Predict the windows that `out` lacks.

    Raises:
        InputError: a window is refused, since arms are compared on the same windows; the message names it
    """
    for name, reason in evaluate(predictor, suite, windows, settings, out)["refused"].items():
        raise InputError(f"window {name}: {reason}")


def read_scores(windows: Sequence[Window], horizons: Sequence[int], out: Path) -> Scores:
    """Read the scores that `score` wrote to `out`."""
    records = read_records(out / "predictions.jsonl")
    pairs = [[(r["prediction"], r["target"]) for r in (records[w["id"], k] for k in horizons)] for w in windows]
    scores = {
        name: np.array([[metric(*pair) for pair in row] for row in pairs])
        for name, metric in (("em", exact_match), ("f1", token_f1))
    }
    if losses := _read_losses(out / NATS):
        scores["nats"] = np.array([losses[w["id"]]["nats"] for w in windows])
    return scores


def add_losses(predictor: CheckpointPredictor, windows: Sequence[Window], settings: RunSettings, out: Path) -> None:
    """Append the teacher-forced losses of missing windows to `out`, batch by batch."""
    path = out / NATS
    known = _read_losses(path)
    with tqdm(total=len(windows), initial=len(known), unit="window", desc=f"teacher-forced {settings.context}") as bar:
        for batch in plan_batches(windows, settings):
            missing = [window for window in batch if window["id"] not in known]
            if missing:
                losses = nll(predictor, missing, settings.context, settings.horizons)
                append_lines(path, [_line(w, row, settings.horizons) for w, row in zip(missing, losses, strict=True)])
                bar.update(len(missing))


def nll(
    predictor: CheckpointPredictor, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
) -> list[dict[int, tuple[float, int]]]:
    """Return the teacher-forced loss of the true observations: for each window, by horizon, (nats, tokens)."""
    losses: list[dict[int, tuple[float, int]]] = [{} for _ in windows]
    worlds = predictor.begin(windows, context_kind)
    for k in range(1, max(horizons) + 1):
        worlds.step([window["actions"][k - 1] for window in windows], decode=False)
        if k in horizons:
            nats, tokens = nll_of_rows(worlds, [window["observations"][k - 1] for window in windows])
            for row, loss, count in zip(losses, nats.tolist(), tokens.tolist(), strict=True):
                row[k] = (loss, count)
    return losses


def _line(window: Window, losses: dict[int, tuple[float, int]], horizons: Sequence[int]) -> dict[str, Any]:
    nats, tokens = zip(*(losses[k] for k in horizons), strict=True)
    return {"id": window["id"], "nats": nats, "tokens": tokens}


def _read_losses(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    drop_torn_line(path)
    return {line["id"]: line for _, line in read_json_lines(path)}


@dataclass(frozen=True)
class LatentNorms:
    """RMS of h_k at the state slots by horizon, from 0 (the encoded context): mean and largest over windows."""

    mean: list[float]
    largest: list[float]


def latent_norms(
    predictor: CheckpointPredictor, windows: Sequence[Window], context_kind: ContextKind, last: int, batch_size: int
) -> LatentNorms:
    """Measure the latent over `last` steps that cycle through each window's actions."""
    batches = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    norms = np.concatenate([_batch_norms(predictor, batch, context_kind, last) for batch in batches])
    return LatentNorms(norms.mean(0).tolist(), norms.max(0).tolist())


def encoded(predictor: CheckpointPredictor, windows: Sequence[Window], context_kind: ContextKind) -> World:
    """Return the windows' worlds as one batch."""
    contexts = [window_context(window, context_kind) for window in windows]
    return predictor.world_model.encode(contexts, predictor.depth)


def _batch_norms(
    predictor: CheckpointPredictor, windows: Sequence[Window], context_kind: ContextKind, last: int
) -> Values:
    """Return RMS values (windows, last + 1)."""
    world = encoded(predictor, windows, context_kind)
    worlds = [world.latent]
    for step in range(last):
        world = predictor.world_model.advance(world, [w["actions"][step % len(w["actions"])] for w in windows])
        worlds.append(world.latent)
    return np.stack([h.float().square().mean((1, 2)).sqrt().cpu().numpy() for h in worlds], axis=1)
