"""Measure pixel worlds.

`accuracy` trains TWISTED in several ways by a written protocol and counts frames predicted right, decoder by decoder.
Killed and started again with the same arguments it goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "python -m eval pixels accuracy --out runs/studies/twisted-accuracy"
PROTOCOL = Path("configs/studies/twisted-accuracy.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    purpose = "exact next frames by decoder, of models trained as a protocol says"
    accuracy = tasks.add_parser("accuracy", help=purpose, description=purpose)
    accuracy.add_argument("--protocol", type=Path, default=PROTOCOL, help="default: %(default)s")
    accuracy.add_argument("--out", type=Path, required=True, help="folder of the study")
    accuracy.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")


def run(args: argparse.Namespace) -> None:
    from eval.pixels.protocol import load_protocol  # torch takes seconds to import
    from eval.pixels.study import run_study

    run_study(load_protocol(args.protocol, args.overrides), args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")
