"""Suites of windows, committed or given by path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines, sha256
from loopwm.records.windows import Window, check_window

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
    """Load a committed suite by name, or a window file by path. Raises InputError naming file, line and field."""
    path = FOLDER / f"{name_or_path}.jsonl.gz"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(suite_names()) or "none"
        raise InputError(f"--suite: must be a file or a committed suite ({known}), got {name_or_path!r}")
    windows = tuple(check_window(record, f"{path}: line {line}") for line, record in read_json_lines(path))
    if not windows:
        raise InputError(f"{path}: must hold windows, found none")
    if repeated := [name for name, count in Counter(window["id"] for window in windows).items() if count > 1]:
        raise InputError(f"{path}: id: must be unique, got {repeated[0]!r} twice")
    return Suite(path.name.split(".jsonl")[0], sha256(path.read_bytes()), windows)
