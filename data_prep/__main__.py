"""Commands of `python -m data_prep`; print one line if a package of the extra `data` is missing."""

from __future__ import annotations

import argparse
import sys

from loopwm.records.command import command_parser, exit_status, missing_package


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults of options."""


COMMANDS: dict[str, tuple[str, str]] = {
    "collect": ("data_prep.collect", "play a simulator and write episodes"),
    "import": ("data_prep.import_logs", "import logs of your own environment as episodes"),
    "prepare": ("data_prep.prepare_logs", "prepare logs for fine-tuning"),
    "tokenize": ("data_prep.tokenize_command", "turn episodes into token shards"),
    "windows": ("data_prep.windows", "cut evaluation windows out of episodes"),
}


def main(arguments: list[str] | None = None) -> int:
    try:
        from data_prep.environments.base import SimulatorError  # loads the environments that other packages register

        parser = command_parser("python -m data_prep", "Prepare data for LoopWM.", COMMANDS, arguments, Help)
        args = parser.parse_args(arguments)
        return exit_status(lambda: args.run(args), SimulatorError)
    except ModuleNotFoundError as error:
        return missing_package(error, "data")


if __name__ == "__main__":
    sys.exit(main())
