"""Print the overall figures of finished runs side by side, with the paper's below."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.commands.harness import read_results
from eval.scores.tables import render_comparison_table

EXAMPLE = "python -m eval table runs/eval/small-observed runs/eval/copy-observed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of finished runs")


def run(args: argparse.Namespace) -> None:
    print(render_comparison_table([read_results(folder / "results.json") for folder in args.runs]), end="")
