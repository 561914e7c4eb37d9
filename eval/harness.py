"""Running a predictor over a suite: batches, resuming, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.files import sha256, write_atomic, write_json
from eval.metrics import METRICS_VERSION
from eval.predictors import Metered, Prediction, Predictor
from eval.provenance import provenance
from eval.report import render_report
from eval.run_folder import Key, Record, RunFolder
from eval.scoring import Item, make_rows, score_window
from eval.windows import Suite, Window, check_runnable, question, stratified_sample
from loopwm.text.format import Regime


@dataclass(frozen=True)
class Settings:
    """What to evaluate. horizons ascend, without repeats; limit None takes every window."""

    model: str
    context: Regime
    horizons: tuple[int, ...]
    limit: int | None
    seed: int
    batch_size: int


def select_windows(suite: Suite, settings: Settings) -> list[Window]:
    """The windows of a run. Raises EvalError for one that is too short or lacks what the regime needs."""
    limit = len(suite.windows) if settings.limit is None else settings.limit
    windows = stratified_sample(suite.windows, limit, settings.seed)
    check_runnable(windows, settings.context, settings.horizons)
    return windows


def evaluate(
    predictor: Predictor, suite: Suite, windows: Sequence[Window], settings: Settings, out: Path
) -> dict[str, Any]:
    """Predicts what `out` lacks, then writes `results.json` and `report.md` there and returns the results."""
    spec = run_spec(predictor, suite, settings)
    folder = RunFolder(out, spec)
    records = predict_missing(predictor, windows, settings, folder)
    results = make_results(spec, windows, settings, records)
    if isinstance(predictor, Metered):
        usage = predictor.usage(windows, settings.context, settings.horizons)
        results["provenance"]["usage"] = dict(usage)
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render_report(results))
    return results


def run_spec(predictor: Predictor, suite: Suite, settings: Settings) -> dict[str, Any]:
    """All that decides the predictions; a folder with another one is refused."""
    return {
        "model": settings.model,
        "suite": suite.name,
        "context": settings.context,
        "metrics_version": METRICS_VERSION,
        "suite_sha256": suite.sha256,
        **predictor.identity,
        "horizons": list(settings.horizons),
        "limit": settings.limit,
        "seed": settings.seed,
        "batch_size": settings.batch_size,
    }


def plan_batches(windows: Sequence[Window], settings: Settings) -> list[list[Window]]:
    """Batches of similar context length, the longest first, the same whether or not a run was interrupted."""
    ordered = sorted(windows, key=lambda w: (-len(question(w, settings.context, 1)), w["id"]))
    size = settings.batch_size
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def predict_missing(
    predictor: Predictor, windows: Sequence[Window], settings: Settings, folder: RunFolder
) -> dict[Key, Record]:
    """Predicts every batch that is not complete in the folder, appends what it lacks, returns all records."""
    records = folder.read()
    batches = [(batch, _missing(batch, settings, records)) for batch in plan_batches(windows, settings)]
    done = sum(len(batch) for batch, missing in batches if not missing)
    with tqdm(total=len(windows), initial=done, unit="window", desc=f"{settings.model} {settings.context}") as bar:
        for batch, missing in batches:
            if missing:
                predictions = predictor.predict(batch, settings.context, settings.horizons)
                made = _batch_records(batch, predictions, settings)
                new = {key: made[key] for key in missing}
                folder.append(list(new.values()))
                records |= new
                bar.update(len(batch))
    return records


def _missing(batch: Sequence[Window], settings: Settings, records: dict[Key, Record]) -> list[Key]:
    keys = [(window["id"], k) for window in batch for k in settings.horizons]
    return [key for key in keys if key not in records]


def _batch_records(batch: Sequence[Window], predictions: Sequence[Prediction], settings: Settings) -> dict[Key, Record]:
    records: dict[Key, Record] = {}
    for window, prediction in zip(batch, predictions, strict=True):
        records |= window_records(window, prediction, settings.context, settings.horizons)
    return records


def window_records(
    window: Window, prediction: Prediction, regime: Regime, horizons: Sequence[int]
) -> dict[Key, Record]:
    """What is kept of a window's predictions at some horizons."""
    records: dict[Key, Record] = {}
    for k in horizons:
        target = window["observations"][k - 1]
        record = Record(
            id=window["id"],
            horizon=k,
            prompt_sha256=sha256(question(window, regime, k)),
            target_sha256=sha256(target),
            prediction=prediction.texts[k],
            target=target,
            steps_cut=prediction.steps_cut,
        )
        if k in prediction.unanswered:
            record["unanswered"] = True
        records[window["id"], k] = record
    return records


def make_results(
    spec: dict[str, Any], windows: Sequence[Window], settings: Settings, records: dict[Key, Record]
) -> dict[str, Any]:
    """The content of `results.json`."""
    items: list[Item] = []
    for window in windows:
        predictions = {k: records[window["id"], k]["prediction"] for k in settings.horizons}
        items += score_window(window, settings.context, predictions)
    head = ("model", "suite", "context", "metrics_version")
    return {
        **{name: spec[name] for name in head},
        "provenance": {**{k: v for k, v in spec.items() if k not in head}, **provenance()},
        "windows_cut_share": _share_cut(windows, settings, records),
        "unanswered": sum("unanswered" in records[window["id"], k] for window in windows for k in settings.horizons),
        "rows": make_rows(items, settings.horizons),
    }


def _share_cut(windows: Sequence[Window], settings: Settings, records: dict[Key, Record]) -> float:
    """Share of windows whose oldest steps did not fit the context."""
    cut = [records[window["id"], settings.horizons[0]]["steps_cut"] > 0 for window in windows]
    return sum(cut) / len(cut)
