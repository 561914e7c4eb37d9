"""Choose the examples of the few-shot prompt from windows of train episodes.

Windows with a long history are left out. Each further example is the window whose target observations follow the most
verbs that no example before has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from eval.models.fewshot import ask
from eval.scores.suites import load_suite
from lab.data.gzip_bytes import pack_gzip
from loopwm.records.command import positive
from loopwm.records.episodes import TRAIN_SPLITS
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.records.template import window_context
from loopwm.records.windows import Window
from loopwm.text.memory import verb

EXAMPLE = "python -m lab build-examples --windows data/train-windows.jsonl.gz --out eval/data/examples-mine.jsonl.gz"

LONGEST = 3000
"""Most characters of goal and history."""


def choose(windows: Sequence[Window], count: int) -> list[Window]:
    """Choose `count` windows. Raises InputError if too few are short enough."""
    left = [w for w in windows if len(ask(window_context(w, "observed"), w["actions"])) <= LONGEST]
    if len(left) < count:
        raise InputError(f"--count: must be at most {len(left)}, the windows of at most {LONGEST} characters")
    chosen: list[Window] = []
    known_verbs: set[str] = set()
    for _ in range(count):
        best = max(left, key=lambda window: len(_verbs(window) - known_verbs))
        chosen.append(best)
        left.remove(best)
        known_verbs |= _verbs(best)
    return chosen


def _verbs(window: Window) -> set[str]:
    return {verb(action) for action in window["actions"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", required=True, help="window file of train episodes of one environment")
    parser.add_argument("--count", type=positive, default=8, help="examples to choose (default: 8)")
    parser.add_argument("--out", type=Path, required=True, help="file of the examples, .jsonl.gz")


def run(args: argparse.Namespace) -> None:
    windows = load_suite(args.windows).windows
    for window in windows:
        if window["split"] not in TRAIN_SPLITS:
            raise InputError(f"{args.windows}: window {window['id']}: split: must be train, got {window['split']!r}")
    chosen = choose(windows, args.count)
    lines = [json.dumps(window, ensure_ascii=False) + "\n" for window in chosen]
    write_atomic(args.out, pack_gzip("".join(lines)))
    print(f"{args.out}: {len(chosen)} examples, verbs {', '.join(sorted(set().union(*map(_verbs, chosen))))}")
