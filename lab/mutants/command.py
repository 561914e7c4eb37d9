"""Plant faults one at a time in a copy of the project, and run the tests that must find them.

The faults of `faults.yaml` are those that once survived, and their neighbours; `--random N` adds N drawn ones. A fault
is found if its tests fail or do not end. Exit status 2 if one survives that the list does not excuse.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import yaml

from loopwm.records.errors import InputError

EXAMPLE = "python -m lab mutants --area scheduler"

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults.yaml"


@dataclass(frozen=True)
class Fault:
    """A change of one place in a file.

    file: path from the root. find: text that occurs once in it. replace: the fault. tests: arguments of pytest.
    area: a name to select faults by. excuse: why no test finds it; empty if one must.
    """

    area: str
    file: str
    find: str
    replace: str
    tests: str
    excuse: str = ""

    def plant(self, root: Path) -> str:
        """Change the file under `root`; return its former text. Raises InputError if the place is not unique."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.find)) != 1:
            raise InputError(f"{FAULTS.name}: {self.file}: {self.find!r} must occur once, got {count}")
        path.write_text(text.replace(self.find, self.replace))
        return text


def read_faults(path: Path = FAULTS) -> list[Fault]:
    return [Fault(area, **entry) for area, entries in yaml.safe_load(path.read_text()).items() for entry in entries]


def copy_project(root: Path) -> None:
    """Copy every file that git tracks into a clone: runs of the tests record their commit."""
    subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(root)], check=True, capture_output=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)


def first_failure(root: Path, tests: str, patience: float) -> str | None:
    """Run tests in the copy; return the first that fails, or a reason if there is no such test; None if all pass."""
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    command = [sys.executable, "-P", "-m", "pytest", *options, *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"no end within {patience:.0f} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}"


PAIRS = [("<", "<="), (">", ">="), ("==", "!="), ("+", "-"), ("and", "or")]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS}
"""Operators and what a random fault puts in their place."""


def random_faults(rng: random.Random, files: Sequence[str], tests: str) -> Iterator[Fault]:
    """Draw faults without end: one operator is exchanged in a line of code that occurs once in its file."""
    while True:
        file = rng.choice(files)
        text = (ROOT / file).read_text()
        lines = text.split("\n")
        operators = [
            token
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.string in SWAPS and text.count(token.line.rstrip("\n")) == 1 and token.line.count("\n") == 1
        ]
        if operators:
            token = rng.choice(operators)
            line, start = lines[token.start[0] - 1], token.start[1]
            changed = line[:start] + SWAPS[token.string] + line[token.end[1] :]
            yield Fault("random", file, line, changed, tests)


def run_faults(faults: Sequence[Fault], patience: float) -> list[Fault]:
    """Plant each fault in turn and print what became of it; return those that survive without an excuse."""
    survivors, passed = [], set[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_project(root)
        for number, fault in enumerate(faults, start=1):
            # Tests that fail without a fault would find any.
            if fault.tests not in passed and (reason := first_failure(root, fault.tests, patience)):
                raise InputError(f"{fault.tests}: must pass without a fault, got {reason}")
            passed.add(fault.tests)
            started, former = time.monotonic(), fault.plant(root)
            failure = first_failure(root, fault.tests, patience)
            (root / fault.file).write_text(former)
            if failure is None and not fault.excuse:
                survivors.append(fault)
            state = f"found by {failure}" if failure else f"excused: {fault.excuse}" if fault.excuse else "SURVIVES"
            place = f"{fault.file}: {fault.find.strip().splitlines()[0]}"
            print(f"{number}/{len(faults)} {time.monotonic() - started:.0f} s {state}  {place}", flush=True)
    return survivors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--area", action="append", help="areas of the list (default: all)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random faults in --files, beside the list")
    parser.add_argument("--files", nargs="*", default=[], help="where random faults are planted")
    parser.add_argument("--tests", default="tests", help="tests that must find random faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=600, help="seconds for the tests of a fault (default: 600)")


def run(args: argparse.Namespace) -> None:
    """Plant the chosen faults. Raises InputError if one survives."""
    faults = read_faults()
    areas = {fault.area for fault in faults}
    if unknown := set(args.area or ()) - areas:
        raise InputError(f"--area: must be one of {sorted(areas)}, got {sorted(unknown)}")
    chosen = [fault for fault in faults if not args.area or fault.area in args.area]
    if args.random:
        chosen = list(islice(random_faults(random.Random(args.seed), args.files, args.tests), args.random))
    survivors = run_faults(chosen, args.patience)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults are found or excused")
    if survivors:
        raise InputError(f"{len(survivors)} faults survive")
