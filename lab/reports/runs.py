"""Runs of a report: checked against their suite and scored item by item, finished or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.commands.harness import read_results, recorded_prediction
from eval.scores.metrics import METRICS_VERSION
from eval.scores.predictions import Key, Record, Refusals, records_by_key
from eval.scores.rows import Item, make_rows, score_window
from eval.scores.seen import Seen, find_seen, load_table
from eval.scores.suites import Suite, load_suite
from lab.reports.error_kinds import ErrorKind, error_kind
from loopwm.records.errors import InputError
from loopwm.records.files import parse_object, read_json, sha256
from loopwm.records.template import ContextKind
from loopwm.records.windows import Window, question, refusal, stratified_sample

_SPEC = ("model", "suite", "context", "metrics_version", "suite_sha256", "horizons", "limit", "seed")


@dataclass(frozen=True)
class Run:
    """Run.

    items: windows with all horizons predicted
    rows: as in `results.json`
    window_count: number of windows of the run
    refused: windows that could not be shown, with the reason
    cut_share: share of windows that lost their oldest steps
    """

    folder: Path
    spec: Mapping[str, Any]
    suite: Suite
    items: tuple[Item, ...]
    rows: tuple[Mapping[str, Any], ...]
    window_count: int
    refused: Refusals
    finished: bool
    cut_share: float
    provenance: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.spec["model"])

    @property
    def context(self) -> ContextKind:
        context_kind: ContextKind = self.spec["context"]
        return context_kind

    @property
    def horizons(self) -> list[int]:
        return list(self.spec["horizons"])

    @property
    def last(self) -> int:
        """Return the largest horizon."""
        return self.horizons[-1]

    @property
    def windows(self) -> int:
        return len(self.items) // len(self.horizons)

    def at(self, horizon: int) -> list[Item]:
        return [item for item in self.items if item.horizon == horizon]

    def errors(self, horizon: int) -> Counter[ErrorKind]:
        """Count the wrong predictions at a horizon by kind."""
        last = {window["id"]: window["history"][-1]["observation"] for window in self.suite.windows}
        return Counter(
            error_kind(item.game.partition("/")[0], item.prediction, item.reference, last[item.window_id])
            for item in self.at(horizon)
            if not item.scores["em"]
        )

    def row(self, family: str, horizon: int) -> Mapping[str, Any] | None:
        return next((row for row in self.rows if (row["family"], row["horizon"]) == (family, horizon)), None)


class SuiteStore:
    """Suites by the hash in runs: the given window files, then the committed suites, each read once.

    tables: results of `build-seen`, which take precedence over committed ones
    """

    def __init__(self, files: Sequence[Path], tables: Sequence[Path] = ()) -> None:
        self._given = [load_suite(str(path)) for path in files]
        self._committed: dict[str, Suite] = {}
        self._tables = [load_table(path) for path in tables]

    def seen(self, suite: Suite, results: Mapping[str, Any] | None) -> Seen | None:
        """Return the suite's seen table: a given one, else one that fits the run's results."""
        given = (table for table in self._tables if table.suite_sha256 == suite.sha256)
        if table := next(given, None):
            return table
        committed = find_seen(suite, None)
        if committed is None or results is None or results["seen_in"] == committed.training_set:
            return committed
        return None  # the training set is unknown, or another one than the table's

    def find(self, folder: Path, spec: Mapping[str, Any]) -> Suite:
        """Find the suite of a run.

        Raises:
            InputError: the suite is missing or has changed since the run
        """
        name, wanted = spec["suite"], spec["suite_sha256"]
        for suite in self._given:
            if suite.sha256 == wanted:
                return suite
        suite = self._load(folder, name)
        if suite.sha256 != wanted:
            raise InputError(
                f"{folder}: suite_sha256: the run is of another version of {name!r} ({wanted[:12]}, not "
                f"{suite.sha256[:12]}); run it again, or give that window file with --suites"
            )
        return suite

    def _load(self, folder: Path, name: str) -> Suite:
        if name not in self._committed:
            try:
                self._committed[name] = load_suite(name)
            except InputError as error:
                raise InputError(
                    f"{folder}: suite: {name!r} is not committed; give its window file with --suites"
                ) from (error)
        return self._committed[name]


@dataclass(frozen=True)
class CheckedRun:
    """Checked run, not scored yet. windows: those with all horizons predicted."""

    folder: Path
    spec: Mapping[str, Any]
    suite: Suite
    windows: Sequence[Window]
    window_count: int
    refused: Refusals
    records: Mapping[Key, Record]
    results: Mapping[str, Any] | None
    seen: Seen | None

    def score(self) -> Run:
        context_kind, horizons = self.spec["context"], self.spec["horizons"]
        predicted = [(window, recorded_prediction(window, self.records, horizons)) for window in self.windows]
        items = tuple(item for pair in predicted for item in score_window(pair[0], context_kind, pair[1], self.seen))
        results = self.results or {"rows": make_rows(items, horizons), "provenance": {}}
        cut = [self.records[window["id"], horizons[0]]["steps_cut"] > 0 for window in self.windows]
        return Run(
            self.folder, self.spec, self.suite, items, tuple(results["rows"]), self.window_count, self.refused,
            self.results is not None, sum(cut) / len(cut), results["provenance"],
        )  # fmt: skip


def check_run(folder: Path, store: SuiteStore) -> CheckedRun:
    """Read and check a run.

    Raises:
        InputError: it is no run, has no predictions, or its predictions are of another suite
    """
    spec = _read_spec(folder)
    suite = store.find(folder, spec)
    records = _read_predictions(folder)
    check_records(folder / "predictions.jsonl", records, suite, spec["context"])
    windows = stratified_sample(suite.windows, spec["limit"] or len(suite.windows), spec["seed"])
    refused = {line["id"]: line["reason"] for _, line in settled_lines(folder / "refused.jsonl")}
    refused |= {w["id"]: reason for w in windows if (reason := refusal(w, spec["context"])) is not None}
    complete = [window for window in windows if all((window["id"], k) in records for k in spec["horizons"])]
    if not complete:
        raise InputError(f"{folder}: predictions.jsonl: no window is complete yet")
    path = folder / "results.json"
    results = read_results(path) if path.is_file() else None  # None: the run is unfinished
    if results is not None and len(complete) + len(refused) < len(windows):
        raise InputError(f"{folder}: predictions.jsonl: {len(complete)} of {len(windows)} windows, but it has results")
    return CheckedRun(
        folder, spec, suite, complete, len(windows), refused, records, results, store.seen(suite, results)
    )


def _read_spec(folder: Path) -> dict[str, Any]:
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: not a run: it has no run.json")
    spec: dict[str, Any] = read_json(folder / "run.json")
    for field in _SPEC:
        if field not in spec:
            raise InputError(f"{folder / 'run.json'}: {field}: missing")
    if spec["metrics_version"] != METRICS_VERSION:
        raise InputError(
            f"{folder}: metrics_version: {spec['metrics_version']!r}, this report is of {METRICS_VERSION!r}"
        )
    return spec


def _read_predictions(folder: Path) -> dict[Key, Record]:
    path = folder / "predictions.jsonl"
    records = records_by_key(settled_lines(path), path)
    if not records:
        raise InputError(f"{folder}: predictions.jsonl: no predictions")
    return records


def settled_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a file, none if it is missing, without the torn last one of a running or killed run."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    for number, line in enumerate(whole.split("\n"), start=1):
        if line.strip():
            yield number, parse_object(line, f"{path}: line {number}")


def check_records(path: Path, records: Mapping[Key, Record], suite: Suite, context_kind: ContextKind) -> None:
    """Check predictions against the suite.

    Raises:
        InputError: the window, prompt or target of a prediction is not the suite's; the message names the first
    """
    windows = {window["id"]: window for window in suite.windows}
    for (name, horizon), record in records.items():
        where = f"{path}: {name}, horizon {horizon}"
        if name not in windows:
            raise InputError(f"{where}: id: no window of {suite.name!r}")
        window = windows[name]
        if horizon not in range(1, len(window["observations"]) + 1):
            raise InputError(f"{where}: horizon: the window has {len(window['observations'])} steps")
        prompt = question(window, context_kind, horizon)
        hashes = {"target_sha256": sha256(window["observations"][horizon - 1]), "prompt_sha256": sha256(prompt)}
        for field, expected in hashes.items():
            if record[field] != expected:  # type: ignore[literal-required]
                raise InputError(f"{where}: {field}: not that of {suite.name!r}")
