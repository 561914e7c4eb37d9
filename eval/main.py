"""Commands of `python -m eval`."""

from __future__ import annotations

from types import ModuleType

from eval.commands import calibration, compare, listing, run, tabulate, validate
from eval.pixels import command as pixels
from loopwm.records.command import command_parser, exit_status

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "run": (run, "evaluate a checkpoint, a baseline or a language model on a suite"),
    "list": (listing, "what can be run: suites and baselines"),
    "validate": (validate, "look through a window file for faults"),
    "compare": (compare, "paired differences of two runs"),
    "table": (tabulate, "several runs side by side"),
    "calibration": (calibration, "how often predictions of a trust are right"),
    "pixels": (pixels, "measure pixel worlds"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("python -m eval", "Evaluate world models.", COMMANDS)
    args = parser.parse_args(arguments)
    return exit_status(lambda: args.run(args))
