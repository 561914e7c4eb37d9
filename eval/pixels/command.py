"""Evaluate a trained agent and random play in the real environment of a pixel world: returns and Crafter score."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from loopwm.records.command import positive
from loopwm.records.files import write_json

EXAMPLE = "python -m eval pixels play --run runs/agent --out runs/agent/play.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    play = tasks.add_parser("play", help="returns of an agent and of random play, and Crafter score")
    play.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    play.add_argument("--episodes", type=positive, default=100, help="default: %(default)s")
    play.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    play.add_argument("--out", type=Path, required=True, help="file of results")


def run(args: argparse.Namespace) -> None:
    from eval.pixels.playing import evaluate  # imported late: torch takes seconds to import, and `--help` needs none

    results = evaluate(args.folder, args.episodes, args.seed)
    write_json(args.out, results)
    print(json.dumps(results, indent=1))
