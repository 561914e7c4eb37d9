"""Folder of one evaluation run.

It holds `run.json` (the run's fingerprint), `predictions.jsonl`, `refused.jsonl`, `commits.json` (the code that made
them), and results. Predictions are appended in whole batches and synced, so an interrupted run loses at most one batch:
a torn last line is dropped, and the rest of its batch is predicted again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, write_json, writing
from loopwm.records.provenance import checkout


class _Predicted(TypedDict):
    id: str
    horizon: int
    prompt_sha256: str
    target_sha256: str
    prediction: str
    target: str
    steps_cut: int


class Record(_Predicted, total=False):
    """Line of `predictions.jsonl`. The hashes are SHA-256 of prompt and target; steps_cut did not fit the context.

    reward (points), ended and trust (probability of this text) are of models that predict them. unanswered marks a
    missing answer: it is scored as an empty one, and requested again.
    """

    reward: float
    ended: bool
    trust: float
    unanswered: bool


Key = tuple[str, int]
Refusals = dict[str, str]
"""Reasons by window that could not be shown to the model, one line of `refused.jsonl` each."""


class PredictionFolder:
    """Opens or creates the folder. Raises InputError if it holds another run."""

    def __init__(self, path: Path, spec: dict[str, Any]) -> None:
        self.path = path
        self._predictions = path / "predictions.jsonl"
        self._refused = path / "refused.jsonl"
        if (path / "run.json").is_file():
            existing = read_json(path / "run.json")
            for name in spec.keys() | existing.keys():
                if (old := existing.get(name)) != (new := spec.get(name)):
                    raise InputError(
                        f"--out: {path}: {name} must be {old!r} as in the folder, got {new!r}; choose another folder"
                    )
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"--out: {path} must be new or a run folder; choose another")
        else:
            write_json(path / "run.json", spec)
        self._noted = False

    def commits(self) -> list[dict[str, Any]]:
        """Return the distinct results of `checkout` of calls that added lines, in order; {} is an unknown commit."""
        path = self.path / "commits.json"
        if path.is_file():
            return read_json(path)
        return [{}] if any(self.path.glob("*.jsonl")) else []  # older runs did not store commits

    def add_lines(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append one JSON object a line to a file of the folder, and sync."""
        self._note_commit()
        append_lines(self.path / name, records)

    def _note_commit(self) -> None:
        """Record the commit before the first lines of a call: a kill in between may leave one too many."""
        if not self._noted and (now := checkout()) not in (known := self.commits()):
            write_json(self.path / "commits.json", [*known, now])
        self._noted = True

    def read(self) -> dict[Key, Record]:
        """Return the answers so far and drop a torn last line."""
        if not self._predictions.exists():
            return {}
        drop_torn_line(self._predictions)
        records = read_records(self._predictions)
        return {key: record for key, record in records.items() if "unanswered" not in record}

    def append(self, records: Sequence[Record]) -> None:
        self.add_lines(self._predictions.name, records)

    def read_refusals(self) -> Refusals:
        """Return the windows refused so far and drop a torn last line."""
        if not self._refused.exists():
            return {}
        drop_torn_line(self._refused)
        return {line["id"]: line["reason"] for _, line in read_json_lines(self._refused)}

    def append_refusals(self, refusals: Refusals) -> None:
        self.add_lines(self._refused.name, [{"id": name, "reason": reason} for name, reason in refusals.items()])


def read_records(predictions: Path) -> dict[Key, Record]:
    """Return the last line of each key. Raises InputError naming file, line and field."""
    return records_by_key(read_json_lines(predictions), predictions)


def records_by_key(lines: Iterable[tuple[int, dict[str, Any]]], predictions: Path) -> dict[Key, Record]:
    """Return the last line of each key. Raises InputError naming file, line and field."""
    records: dict[Key, Record] = {}
    for number, record in lines:
        for name in Record.__required_keys__:
            if name not in record:
                raise InputError(f"{predictions}: line {number}: {name}: missing")
        records[record["id"], record["horizon"]] = Record(**record)  # type: ignore[typeddict-item]
    return records


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append one JSON object a line and sync."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with writing(path), path.open("ab") as file:
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def drop_torn_line(path: Path) -> None:
    """Truncate the file after its last full line."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


@dataclass(frozen=True)
class Prediction:
    """Predicted observations of one window by horizon, and the number of history steps that did not fit the context.

    unanswered: horizons without an answer of the model; their text is empty, and another run may request them again.
    rewards (points) and ends (True if the world is over) of the last step, by horizon too; empty without such heads.
    trusts: probabilities of exactly these texts.
    """

    texts: dict[int, str]
    steps_cut: int = 0
    unanswered: frozenset[int] = frozenset()
    rewards: dict[int, float] = field(default_factory=dict)
    ends: dict[int, bool] = field(default_factory=dict)
    trusts: dict[int, float] = field(default_factory=dict)
