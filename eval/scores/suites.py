"""Suites of windows, committed or given by path, and named selections of their windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines, sha256
from loopwm.records.windows import Window, check_window


@dataclass(frozen=True)
class Selection:
    """Families left out by environment; all windows of other environments stay. source: where they are left out."""

    left_out: Mapping[str, frozenset[str]]
    source: str

    def holds(self, env: str, family: str) -> bool:
        return family not in self.left_out.get(env, frozenset())


SELECTIONS = {
    "word2world": Selection(
        {"scienceworld": frozenset({"Grow", "Incline", "Genetics"})},
        "Word2World (arXiv:2512.18832) on AgentGym's agentenv-sciworld, whose exceptions are the tasks 5-1, 5-2, 9-1, "
        "9-2, 9-3, 10-1 and 10-2",
    )
}


FOLDER = Path(__file__).parents[1] / "suites"


@dataclass(frozen=True)
class Suite:
    """Window file: short name, hash of its bytes, and windows in order."""

    name: str
    sha256: str
    windows: tuple[Window, ...]


def suite_names() -> list[str]:
    """Return the committed suites, sorted."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


def load_suite(name_or_path: str) -> Suite:
    """Load a committed suite by name, or a window file by path; `NAME:SELECTION` takes a part of its windows.

    Raises InputError naming file, line and field, or an unknown selection.
    """
    name, colon, selection = name_or_path.rpartition(":")
    if not colon or Path(name_or_path).is_file():
        return _read_suite(name_or_path)
    return _select(_read_suite(name), selection)


def _select(suite: Suite, selection: str) -> Suite:
    """Return a suite with a name and a hash of its own, so that its figures cannot pass for the whole suite's."""
    if selection not in SELECTIONS:
        raise InputError(f"--suite: selection must be one of {', '.join(SELECTIONS)}, got {selection!r}")
    chosen = tuple(w for w in suite.windows if SELECTIONS[selection].holds(w["env"], w["family"]))
    if not chosen:
        raise InputError(f"--suite: {suite.name!r} must hold windows of {selection!r}")
    ids = "\n".join(window["id"] for window in chosen)
    return Suite(f"{suite.name}:{selection}", sha256(f"{suite.sha256}\n{ids}"), chosen)


def _read_suite(name_or_path: str) -> Suite:
    path = FOLDER / f"{name_or_path}.jsonl.gz"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(suite_names()) or "none"
        raise InputError(f"--suite: must be a file or a committed suite ({known}), got {name_or_path!r}")
    windows = tuple(check_window(record, f"{path}: line {line}") for line, record in read_json_lines(path))
    if not windows:
        raise InputError(f"{path}: must hold windows, found none")
    _check_unique(windows, path)
    return Suite(path.name.split(".jsonl")[0], sha256(path.read_bytes()), windows)


def _check_unique(windows: Sequence[Window], path: Path) -> None:
    ids: set[str] = set()
    for window in windows:
        if window["id"] in ids:
            raise InputError(f"{path}: id: must be unique, got {window['id']!r} twice")
        ids.add(window["id"])
