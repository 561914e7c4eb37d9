"""Write the committed table of the `markov` baseline from train episodes."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.models.markov import build_tables, to_json
from loopwm.records.errors import InputError
from loopwm.records.files import pack_gzip, write_atomic

EXAMPLE = "python -m lab build-markov --episodes data/episodes/train --out eval/data/markov-scienceworld.json.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="train episodes, files or folders")
    parser.add_argument("--out", type=Path, required=True, help="file of the table, .json.gz")


def run(args: argparse.Namespace) -> None:
    tables = build_tables(args.episodes)
    if len(tables) != 1:
        raise InputError(f"--episodes: must be of one environment, got {', '.join(tables) or 'none'}")
    (table,) = tables.values()
    write_atomic(args.out, pack_gzip(to_json(table)))
    print(f"{args.out}: {len(table.actions)} actions from {table.transitions} transitions")
