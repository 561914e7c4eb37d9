"""Check a window file and name every fault by its line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from loopwm.records.errors import InputError
from loopwm.records.files import parse_object, read_lines
from loopwm.records.windows import window_faults

EXAMPLE = "python -m eval validate data/dev-windows.jsonl.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="window file: .jsonl, .jsonl.gz or .jsonl.xz")


def run(args: argparse.Namespace) -> None:
    by_window = []
    for faults in faults_by_window(args.file):
        by_window.append(faults)
        for fault in faults:
            print(f"{args.file}: {fault}")
    if not by_window:
        raise InputError(f"{args.file}: must hold windows, found none")
    bad = sum(map(bool, by_window))
    if bad:
        raise InputError(f"{args.file}: {bad} of {len(by_window)} lines are invalid")
    print(f"{args.file}: {len(by_window)} windows, fine")


def faults_by_window(path: Path) -> Iterator[list[str]]:
    """Yield the number and the faults of every line that is not blank. Raises InputError for an unreadable file."""
    lines_by_id: dict[str, int] = {}
    for line, text in read_lines(path):
        try:
            record = parse_object(text, f"line {line}")
        except InputError as error:
            yield [str(error)]
            continue
        faults = [f"line {line}: {fault}" for fault in window_faults(record)]
        name = record.get("id")
        if isinstance(name, str) and lines_by_id.setdefault(name, line) != line:
            faults.append(f"line {line}: id: {name!r} is also that of line {lines_by_id[name]}")
        yield faults
