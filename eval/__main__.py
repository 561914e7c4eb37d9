"""Commands of `python -m eval`; print one line if a package of the extra `eval` is missing."""

from __future__ import annotations

import sys

from loopwm.records.command import command_parser, exit_status, missing_package

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("eval.commands.run", "evaluate a checkpoint, a baseline or a language model on a suite"),
    "list": ("eval.commands.listing", "what can be run: suites and baselines"),
    "validate": ("eval.commands.validate", "look through a window file for faults"),
    "compare": ("eval.commands.compare", "paired differences of two runs"),
    "table": ("eval.commands.tabulate", "several runs side by side"),
    "calibration": ("eval.commands.calibration", "how often predictions of a trust are right"),
}


def main(arguments: list[str] | None = None) -> int:
    try:
        args = command_parser("python -m eval", "Evaluate world models.", COMMANDS, arguments).parse_args(arguments)
        return exit_status(lambda: args.run(args))
    except ModuleNotFoundError as error:
        return missing_package(error, "eval")


if __name__ == "__main__":
    sys.exit(main())
