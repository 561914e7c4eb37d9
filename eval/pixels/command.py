"""Evaluate a trained agent and random play in the real environment of a pixel world: returns and Crafter score."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from eval.models.options import positive
from loopwm.records.errors import InputError
from loopwm.records.files import write_json

EXAMPLE = "python -m eval pixels play --run runs/agent --out runs/agent/play.json"

RENAMED = {
    "sheet": "lab pixels filmstrip",
    "claims": "lab pixels paper-claims",
    "recall": "lab pixels memory-recall",
    "choice": "lab pixels memory-choice",
    "coin": "lab pixels calibration",
    "trust": "lab pixels rollout-curve",
    **{name: f"lab pixels {name}" for name in ("accuracy", "memory", "curve", "filmstrip", "film", "record", "atari")},
}
"""Tasks of earlier releases and the commands that replace them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    play = tasks.add_parser("play", help="returns of an agent and of random play, and Crafter score")
    play.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    play.add_argument("--episodes", type=positive, default=100, help="default: %(default)s")
    play.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    play.add_argument("--out", type=Path, required=True, help="file of results")
    play.set_defaults(work=_play)
    for name, command in RENAMED.items():
        # Without prefix characters the parser accepts all options of the old command, so `run` can name the new one.
        renamed = tasks.add_parser(name, prefix_chars="\0", add_help=False)
        renamed.add_argument("rest", nargs="*")
        renamed.set_defaults(work=partial(_refuse_renamed, name, command))


def run(args: argparse.Namespace) -> None:
    args.work(args)


def _refuse_renamed(name: str, command: str, args: argparse.Namespace) -> None:
    raise InputError(f"eval pixels {name}: use python -m {command}")


def _play(args: argparse.Namespace) -> None:
    from eval.pixels.playing import evaluate  # imported late: torch takes seconds to import, and `--help` needs none

    results = evaluate(args.folder, args.episodes, args.seed)
    write_json(args.out, results)
    print(json.dumps(results, indent=1))
