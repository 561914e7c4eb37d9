"""Commands of `python -m data_prep`."""

from __future__ import annotations

import argparse
from types import ModuleType

from data_prep import collect, import_logs, prepare_logs, tokenize, windows
from data_prep.environments.base import SimulatorError
from loopwm.records.command import command_parser, exit_status


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults of options."""


COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "collect": (collect, "play a simulator and write episodes"),
    "import": (import_logs, "import logs of your own environment as episodes"),
    "prepare": (prepare_logs, "prepare logs for fine-tuning"),
    "tokenize": (tokenize, "turn episodes into token shards"),
    "windows": (windows, "cut evaluation windows out of episodes"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("python -m data_prep", "Prepare data for LoopWM.", COMMANDS, Help)
    args = parser.parse_args(arguments)
    return exit_status(lambda: args.run(args), SimulatorError)
