"""Run a predictor over a suite: batches, resuming, results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.models.base import Metered, Predictor, Trained
from eval.scores.intervals import INTERVALS
from eval.scores.metrics import METRICS_VERSION
from eval.scores.predictions import Key, Prediction, PredictionFolder, Record, Refusals
from eval.scores.rows import Item, make_rows, score_window, summarize_pairs
from eval.scores.seen import Seen
from eval.scores.suites import Suite
from eval.scores.tables import render_report
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, sha256, write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import ContextKind, FormatError
from loopwm.records.windows import Window, check_horizons, game_of, question, refusal, stratified_sample


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. horizons: ascending, without repeats. limit: windows to take, None for all."""

    model: str
    context: ContextKind
    horizons: tuple[int, ...]
    limit: int | None
    seed: int
    batch_size: int


def sample_windows(suite: Suite, settings: RunSettings) -> list[Window]:
    """Return the windows of a run, including those it will refuse. Raises InputError for one that is too short."""
    limit = len(suite.windows) if settings.limit is None else settings.limit
    windows = stratified_sample(suite.windows, limit, settings.seed)
    check_horizons(windows, settings.horizons)
    return windows


def evaluate(
    predictor: Predictor,
    suite: Suite,
    windows: Sequence[Window],
    settings: RunSettings,
    out: Path,
    seen_table: Seen | None = None,
) -> dict[str, Any]:
    """Predict what is missing from `out`, write `results.json` and `report.md` there and return the results.

    A window that cannot be rendered is refused: counted and named, but not scored. Raises InputError if all are
    refused; nothing is written if the context alone refuses them all.
    """
    reasons = {window["id"]: refusal(window, settings.context) for window in windows}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    shown = _not_refused(windows, refused)
    spec = run_spec(predictor, suite, settings)
    folder = PredictionFolder(out, spec)
    records = predict_missing(predictor, shown, settings, folder)
    refused |= folder.read_refusals()
    scored = _not_refused(windows, refused)
    results = make_results(spec, scored, refused, settings, records, seen_table)
    results["provenance"]["commits"] = folder.commits()
    if isinstance(predictor, Trained):
        results["foreign"] = predictor.count_foreign(scored)
    if isinstance(predictor, Metered):
        usage = predictor.usage(scored, settings.context, settings.horizons)
        results["provenance"]["usage"] = dict(usage)
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render_report(results))
    return results


def _not_refused(windows: Sequence[Window], refused: Refusals) -> list[Window]:
    """Return the windows that are not refused. Raises InputError naming the first window if none is left."""
    rest = [window for window in windows if window["id"] not in refused]
    if not rest:
        name = windows[0]["id"]
        raise InputError(f"window {name}: {refused[name]} (all other windows are refused too)")
    return rest


def run_spec(predictor: Predictor, suite: Suite, settings: RunSettings) -> dict[str, Any]:
    """Return the run's fingerprint; resuming with a different one is an error."""
    return {
        "suite": suite.name,
        "metrics_version": METRICS_VERSION,
        "suite_sha256": suite.sha256,
        **predictor.identity,
        **vars(settings),
        "horizons": list(settings.horizons),
    }


def plan_batches(windows: Sequence[Window], settings: RunSettings) -> list[list[Window]]:
    """Return batches of similar context length, the longest first, the same for an interrupted run."""
    ordered = sorted(windows, key=lambda w: (-len(question(w, settings.context, 1)), w["id"]))
    size = settings.batch_size
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def predict_missing(
    predictor: Predictor, windows: Sequence[Window], settings: RunSettings, folder: PredictionFolder
) -> dict[Key, Record]:
    """Predict every batch that is incomplete in the folder, append the missing records, return all records."""
    records, refused = folder.read(), folder.read_refusals()
    batches = []
    for batch in plan_batches(windows, settings):
        keys = [(window["id"], k) for window in batch if window["id"] not in refused for k in settings.horizons]
        batches.append((batch, [key for key in keys if key not in records]))
    done = sum(len(batch) for batch, missing in batches if not missing)
    with tqdm(total=len(windows), initial=done, unit="window", desc=f"{settings.model} {settings.context}") as bar:
        for batch, missing in batches:
            if missing:
                batch_records, too_long = predict_batch(predictor, batch, settings)
                folder.append_refusals({name: too_long[name] for name in too_long if name not in refused})
                new = {key: batch_records[key] for key in missing if key in batch_records}
                folder.append(list(new.values()))
                records |= new
                bar.update(len(batch))
    return records


def predict_batch(
    predictor: Predictor, batch: Sequence[Window], settings: RunSettings
) -> tuple[dict[Key, Record], Refusals]:
    """Return records of the windows that can be rendered, and the reasons for the others.

    A batch with a window that cannot be rendered is predicted window by window, so that a resumed run splits it alike.
    """
    try:
        predictions = predictor.predict(batch, settings.context, settings.horizons)
    except InputError as error:
        if not isinstance(error.__cause__, FormatError):  # not about one window
            raise
        if len(batch) == 1:
            return {}, {batch[0]["id"]: str(error.__cause__)}
        records, refused = zip(*(predict_batch(predictor, [window], settings) for window in batch), strict=True)
        return reduce(or_, records), reduce(or_, refused)
    pairs = zip(batch, predictions, strict=True)
    return reduce(or_, (window_records(*pair, settings.context, settings.horizons) for pair in pairs)), {}


def window_records(
    window: Window, prediction: Prediction, context_kind: ContextKind, horizons: Sequence[int]
) -> dict[Key, Record]:
    """Return the stored records of a window's predictions at some horizons."""
    records: dict[Key, Record] = {}
    for k in horizons:
        target = window["observations"][k - 1]
        record = Record(
            id=window["id"],
            horizon=k,
            prompt_sha256=sha256(question(window, context_kind, k)),
            target_sha256=sha256(target),
            prediction=prediction.texts[k],
            target=target,
            steps_cut=prediction.steps_cut,
        )
        if k in prediction.unanswered:
            record["unanswered"] = True
        if k in prediction.rewards:
            record["reward"] = prediction.rewards[k]
        if k in prediction.ends:
            record["ended"] = prediction.ends[k]
        if k in prediction.trusts:
            record["trust"] = prediction.trusts[k]
        records[window["id"], k] = record
    return records


def recorded_prediction(window: Window, records: Mapping[Key, Record], horizons: Iterable[int]) -> Prediction:
    """Rebuild a prediction from its records. Raises KeyError for a horizon without one."""
    by_horizon = {k: records[window["id"], k] for k in horizons}
    return Prediction(
        texts={k: record["prediction"] for k, record in by_horizon.items()},
        rewards={k: record["reward"] for k, record in by_horizon.items() if "reward" in record},
        ends={k: record["ended"] for k, record in by_horizon.items() if "ended" in record},
    )


def make_results(
    spec: dict[str, Any],
    windows: Sequence[Window],
    refused: Refusals,
    settings: RunSettings,
    records: dict[Key, Record],
    seen_table: Seen | None,
) -> dict[str, Any]:
    """Return the content of `results.json`. windows: those that were scored; every figure is of them only."""
    items: list[Item] = []
    for window in windows:
        predicted = recorded_prediction(window, records, settings.horizons)
        items += score_window(window, settings.context, predicted, seen_table)
    # Windows whose oldest steps did not fit the context, which does not depend on the horizon.
    cut = sum(records[window["id"], settings.horizons[0]]["steps_cut"] > 0 for window in windows)
    head = ("model", "suite", "context", "metrics_version")
    return {
        **{name: spec[name] for name in head},
        "intervals": INTERVALS,
        "provenance": {**{k: v for k, v in spec.items() if k not in head}, **provenance("eval")},
        "windows": {"asked": len(windows) + len(refused), "scored": len(windows), "refused": len(refused)},
        "refused": refused,
        "games": {window["id"]: game_of(window) for window in windows},
        "windows_cut_share": cut / len(windows),
        "unanswered": sum("unanswered" in records[window["id"], k] for window in windows for k in settings.horizons),
        "seen_in": None if seen_table is None else seen_table.training_set,
        "rows": make_rows(items, settings.horizons),
        "pairs": summarize_pairs(items),
    }


def read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`. Raises InputError for one without rows or with intervals of another kind."""
    results: dict[str, Any] = read_json(path)
    for name in ("rows", "provenance"):
        if name not in results:
            raise InputError(f"{path}: {name}: missing")
    if results.get("intervals") != INTERVALS:
        raise InputError(
            f"{path}: intervals: must be {INTERVALS!r} (over games), got {results.get('intervals', 'over windows')!r}; "
            "rerun the run's command to rewrite the file from its predictions"
        )
    return results
