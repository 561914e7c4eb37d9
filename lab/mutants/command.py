"""Plant faults one at a time in a copy of the project, and run the tests that must find them.

The faults of `faults.yaml` are those that once survived, and their neighbours; `--random N` adds N drawn ones. A fault
is found if its tests fail or do not end. Exit status 2 if one survives that the list does not excuse.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

import yaml

from loopwm.records.errors import InputError

EXAMPLE = "python -m lab mutants --area scheduler"

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults.yaml"
NOT_RUN = (3, 4, 5)
"""Exit statuses of pytest: internal error, usage, no tests. 2, an error of collection, finds a fault in an import."""


@dataclass(frozen=True)
class Fault:
    """A change of one place in a file.

    file: path from the root. find: text that occurs once in it. replace: the fault. tests: arguments of pytest.
    area: a name to select faults by. excuse: why no test finds it; empty if one must. every: all tests must find it.
    """

    area: str
    file: str
    find: str
    replace: str
    tests: str
    excuse: str = ""
    every: bool = False

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


class Tests:
    """Runs tests in a copy of the project. Use as a context manager."""

    def __init__(self, root: Path) -> None:
        self._log = root.with_name(f"{root.name}.log")
        command = [sys.executable, "-P", str(Path(__file__).with_name("fork_server.py")), str(self._log)]
        environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()
        self._log.unlink(missing_ok=True)

    def first_failure(self, tests: str, patience: float, every: bool = False) -> str | None:
        """Return the first test that fails, or a reason if there is no such test.

        None if all pass; if one passes, where `every` test must fail. patience: seconds until they are killed. Raises
        InputError if pytest does not run the tests, as where one of them does not exist.
        """
        options = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--color=no"]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        arguments = [*options, *([] if every else ["-x"]), *shlex.split(tests)]
        print(json.dumps((arguments, math.ceil(patience))), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        if status == -signal.SIGALRM:
            return f"no end within {patience:g} s"
        if status == 0:
            return None
        if status in NOT_RUN:
            raise InputError(f"tests: must run, got exit status {status} of pytest for {tests}")
        log = self._log.read_text(errors="replace")
        if every and re.search(r"\b\d+ passed\b", log):
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
        return failed[1] if failed else f"exit status {status}"


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
    survivors, finders = [], set[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        copy_project(root)
        with Tests(root) as tests:
            for number, fault in enumerate(faults, start=1):
                started, former = time.monotonic(), fault.plant(root)
                failure = tests.first_failure(fault.tests, patience, fault.every)
                (root / fault.file).write_text(former)
                if failure:
                    named = "::" in fault.tests or "::" not in failure
                    finders.add(fault.tests if named else failure.partition("[")[0])
                elif not fault.excuse:
                    survivors.append(fault)
                state = f"found by {failure}" if failure else f"excused: {fault.excuse}" if fault.excuse else "SURVIVES"
                place = f"{fault.file}: {fault.find.strip().splitlines()[0]}"
                print(f"{number}/{len(faults)} {time.monotonic() - started:.0f} s {state}  {place}", flush=True)
            # Tests that fail without a fault, too, would find any.
            if finders and (failure := tests.first_failure(" ".join(sorted(finders)), patience * len(finders))):
                raise InputError(f"tests must pass without a fault, got {failure}")
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
    if not 0 < args.patience < math.inf:
        raise InputError(f"--patience: must be a number above 0, got {args.patience:g}")
    if args.random and not args.files:
        raise InputError(f"--random {args.random}: must have --files, where faults are planted")
    areas = {fault.area for fault in faults}
    if unknown := set(args.area or ()) - areas:
        raise InputError(f"--area: must be one of {sorted(areas)}, got {sorted(unknown)}")
    chosen = [fault for fault in faults if not args.area or fault.area in args.area]
    if args.random:
        chosen = list(islice(random_faults(random.Random(args.seed), args.files, args.tests), args.random))
    survivors = run_faults(chosen, args.patience)
    planted, missed = (Counter(fault.area for fault in faults) for faults in (chosen, survivors))
    for area, count in planted.items():
        print(f"{area}: {count - missed[area]} of {count}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults are found or excused")
    if survivors:
        raise InputError(f"{len(survivors)} faults survive")
