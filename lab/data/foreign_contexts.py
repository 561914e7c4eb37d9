"""Measure how well the wording of a context tells environments of the training data from others.

`foreign_contexts.jsonl.xz` holds the starts of 200 episodes of environments that no training data has: 60 sessions of
a shell (`examples/own-terminal`), 40 of SQLite, 40 replies of web services, and 60 from games and offices, written by
hand, six of them not in English.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from eval.commands.calibration import auroc
from eval.scores.suites import load_suite
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED, read_json_lines
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.world import tokens_per_byte

EXAMPLE = "python -m lab foreign-contexts --model loopwm/pretrained"
FOREIGN = Path(__file__).with_name("foreign_contexts.jsonl.xz")
DEV_SUITES = ("scienceworld-dev", "alfworld-dev")


def foreign_starts() -> list[dict[str, Any]]:
    """Return kind, goal and first observation of each foreign context."""
    return [record for _, record in read_json_lines(FOREIGN)]


def dev_starts() -> list[tuple[str, str]]:
    """Return goal and first observation of the dev windows of both worlds."""
    suites = map(load_suite, DEV_SUITES)
    return [(window["goal"], window["history"][0]["observation"]) for suite in suites for window in suite.windows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint (default: the shipped one)")


def run(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.model / "tokenizer.json")
    limit = LoopWMConfig.from_pretrained(args.model).tokens_per_byte
    if limit is None:
        raise InputError(f"--model: {args.model} must know tokens_per_byte; train it again to measure that")
    foreign = [(one["kind"], tokens_per_byte(tokenizer, one["goal"], one["observation"])) for one in foreign_starts()]
    known = [tokens_per_byte(tokenizer, goal, seen) for goal, seen in dev_starts()]
    scores = np.array([ratio for _, ratio in foreign] + known)
    area = auroc(scores / scores.max(), np.arange(len(scores)) < len(foreign))
    flagged = Counter(kind for kind, ratio in foreign if ratio > limit)
    totals = Counter(kind for kind, _ in foreign)
    print(f"AUROC {area:.4f}; {sum(ratio > limit for ratio in known)} of {len(known)} dev windows above {limit:.3f}")
    print(", ".join(f"{kind}: {flagged[kind]} of {total}" for kind, total in totals.items()))
