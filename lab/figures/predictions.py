"""Predictions of kept runs, small enough to commit: `predictions/NAME.jsonl.xz` in the folder of stored results.

The first line says which run it is, every other line is one prediction. What follows from the suite (targets and
hashes) is left out, and numbers have six digits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eval.commands.calibration import Probabilities, Right
from eval.commands.harness import RunSettings, make_results, read_results, recorded_prediction
from eval.scores.intervals import INTERVALS
from eval.scores.metrics import METRICS_VERSION, exact_match
from eval.scores.predictions import Key, Record, read_records
from eval.scores.rows import Item, score_window
from eval.scores.seen import Seen, find_seen
from eval.scores.suites import Suite, load_suite
from lab.reports import results_page
from lab.reports.results_page import SUITE_TITLES, called
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, write_json, write_lines
from loopwm.records.windows import Window, game_of, stratified_sample

FOLDER, PREVIOUS, SUFFIX = "predictions", "previous", ".jsonl.xz"
LIMIT = 10_000_000
"""Bytes that all stored predictions may take."""

_HEAD = ("model", "suite", "context", "metrics_version", "provenance", "seen_in", "refused")
_ALWAYS = ("id", "horizon", "prediction", "steps_cut")
_IF_PREDICTED = ("reward", "ended", "trust", "unanswered")


def name_of(results: Mapping[str, Any]) -> str:
    """Return the name of a run's files; of a dev suite, several depths and limits are kept apart."""
    name = f"{results['suite']}--{results['context']}--{called(results['model'])}"
    if results["suite"] in SUITE_TITLES:
        return name
    depth = results["provenance"].get("depth")
    return name if depth is None else f"{name}--T{depth}"


def keep(folder: Path, data: Path) -> str:
    """Store the predictions of a finished run, and its results if the page of results shows its suite.

    What is stored of other weights under the same name moves to the folder `previous`. Returns the run's name.

    Raises:
        InputError: the run is not finished, its results do not follow from its predictions, or the predictions of all
            runs would take more than `LIMIT` bytes
    """
    if not (folder / "results.json").is_file():
        raise InputError(f"{folder}: must be a finished run with a results.json")
    results = read_results(folder / "results.json")
    name = name_of(results)
    path = data / FOLDER / f"{name}{SUFFIX}"
    with tempfile.TemporaryDirectory() as scratch:
        trial = Path(scratch) / path.name
        _write(folder, results, trial)
        again = Rescored.read(trial).results()
        if again["rows"] != results["rows"] or again["pairs"] != results["pairs"]:
            raise InputError(f"{folder}: results.json: must follow from predictions.jsonl; rerun the run's command")
        others = (file for file in path.parent.glob(f"*{SUFFIX}") if file != path)
        if (size := sum(file.stat().st_size for file in (*others, trial))) > LIMIT:
            raise InputError(f"{path.parent}: must take at most {LIMIT:,} bytes, got {size:,} with {name}")
        _move_previous(data, name, results)
        if results["suite"] in SUITE_TITLES:
            results_page.keep(folder, data)
        _write(folder, results, path)
    return name


def _write(folder: Path, results: Mapping[str, Any], path: Path) -> None:
    records = read_records(folder / "predictions.jsonl")
    head = {name: results[name] for name in _HEAD}
    head["provenance"] = {name: value for name, value in head["provenance"].items() if name != "versions"}
    lines = (_slim(records[key]) for key in sorted(records) if key[0] in results["games"])
    write_lines(path, (json.dumps(line, ensure_ascii=False) for line in (head, *lines)))


def _slim(record: Record) -> dict[str, Any]:
    fields = {name: record[name] for name in _ALWAYS}  # type: ignore[literal-required]
    fields |= {name: record[name] for name in _IF_PREDICTED if name in record}  # type: ignore[literal-required]
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in fields.items()}


def _move_previous(data: Path, name: str, results: Mapping[str, Any]) -> None:
    """Move stored results and predictions of other weights out of the way: pages show what changed."""
    for path in (data / f"{name}.json", data / FOLDER / f"{name}{SUFFIX}"):
        if path.is_file():
            old = read_json(path) if path.suffix == ".json" else next(read_json_lines(path))[1]
            if old["provenance"].get("model_sha256") != results["provenance"].get("model_sha256"):
                (data / PREVIOUS).mkdir(exist_ok=True)
                path.replace(data / PREVIOUS / path.name)


def exact_matches(path: Path) -> dict[Key, tuple[str, float]]:
    """Return game and exact match, 0 or 1, of stored predictions by window and horizon.

    Raises InputError if they are of another version of their suite.
    """
    lines = read_json_lines(path)
    _, head = next(lines, (0, {}))
    suite = load_suite(head["suite"])
    if suite.sha256 != head["provenance"]["suite_sha256"]:
        raise InputError(f"{path}: suite_sha256: must be {suite.sha256}; run it again and keep that")
    windows = {window["id"]: window for window in suite.windows}
    return {
        (line["id"], line["horizon"]): (
            game_of(windows[line["id"]]),
            exact_match(line["prediction"], windows[line["id"]]["observations"][line["horizon"] - 1]),
        )
        for _, line in lines
    }


def trusts_and_exact(path: Path) -> tuple[Probabilities, Right]:
    """Return trust and whether it is exactly right of stored predictions, (N,) each.

    A text that was cut has no trust, counts as 0 and cannot be right. Raises InputError as `exact_matches` does.
    """
    exact = exact_matches(path)
    lines = (line for _, line in read_json_lines(path) if "id" in line)
    pairs = [(line.get("trust", 0.0), exact[line["id"], line["horizon"]][1] == 1) for line in lines]
    trusts, right = zip(*pairs, strict=True)
    return np.array(trusts), np.array(right)


class Rescored:
    """Stored predictions of a run, scored again.

    records: by window and horizon
    windows: those that were scored
    """

    def __init__(self, head: Mapping[str, Any], records: dict[Key, Record], where: Path) -> None:
        self._head, self.records, self._where = head, records, where
        self._suite = load_suite(head["suite"])
        self._check_suite()
        self._seen = seen_of(self._suite, head["seen_in"], where)
        facts = head["provenance"]
        limit = facts["limit"] or len(self._suite.windows)
        sample = stratified_sample(self._suite.windows, limit, facts["seed"])
        self.windows = [window for window in sample if window["id"] not in head["refused"]]
        self.horizons = tuple(facts["horizons"])
        for window in self.windows:
            for horizon in self.horizons:
                if (window["id"], horizon) not in records:
                    raise InputError(f"{where}: {window['id']}, horizon {horizon}: missing")

    @classmethod
    def read(cls, path: Path) -> Rescored:
        """Read stored predictions. Raises InputError if they are incomplete or of another suite or table."""
        lines = read_json_lines(path)
        _, head = next(lines, (0, {}))
        for name in _HEAD:
            if name not in head:
                raise InputError(f"{path}: line 1: {name}: missing")
        return cls(head, {(line["id"], line["horizon"]): line for _, line in lines}, path)  # type: ignore[misc]

    def _check_suite(self) -> None:
        suite, facts = self._suite, self._head["provenance"]
        for name, expected, actual in (
            ("suite_sha256", suite.sha256, facts["suite_sha256"]),
            ("metrics_version", METRICS_VERSION, self._head["metrics_version"]),
        ):
            if expected != actual:
                raise InputError(f"{self._where}: {name}: must be {expected}, got {actual}; run it again and keep that")

    def items(self) -> Iterator[tuple[Window, Item]]:
        """Yield every prediction, scored, with its window."""
        for window in self.windows:
            predicted = recorded_prediction(window, self.records, self.horizons)
            for item in score_window(window, self._head["context"], predicted, self._seen):
                yield window, item

    def results(self) -> dict[str, Any]:
        """Return the content of `results.json`, made from the predictions."""
        facts = self._head["provenance"]
        names = ("model", "suite", "context", "metrics_version")
        spec = {**{name: self._head[name] for name in names}, **facts}
        settings = RunSettings(
            spec["model"], spec["context"], self.horizons, facts["limit"], facts["seed"], facts["batch_size"]
        )
        refused = dict(self._head["refused"])
        return make_results(spec, self.windows, refused, settings, self.records, self._seen)

    def stored(self) -> dict[str, Any]:
        """Return the result as the page's store would hold it."""
        with tempfile.TemporaryDirectory() as scratch:
            write_json(Path(scratch) / "results.json", {**self.results(), "intervals": INTERVALS})
            results_page.keep(Path(scratch), Path(scratch) / "data")
            (path,) = (Path(scratch) / "data").glob("*.json")
            result: dict[str, Any] = read_json(path)
            return result


def seen_of(suite: Suite, training_set: Mapping[str, Any] | None, where: Path) -> Seen | None:
    """Return the committed table of the run's train episodes, None where the run has none.

    Raises InputError if the committed table is about other episodes.
    """
    if training_set is None:
        return None
    table = find_seen(suite, None)
    if table is None or table.training_set != training_set:
        raise InputError(f"{where}: seen_in: the suite's table of seen windows is about other train episodes")
    return table
