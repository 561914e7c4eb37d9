"""The command `loopwm`: `loopwm serve` is `python -m serve`, from any folder."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="loopwm", description=__doc__, epilog="options: loopwm serve --help")
    parser.add_argument("--version", action="version", version=version("loopwm"))
    parser.add_argument("command", choices=["serve"])
    parser.parse_args(arguments[:1])

    from serve.__main__ import main as serve  # brings torch, which takes seconds

    return serve(arguments[1:])
