"""Commands of `python -m data_prep`."""

from __future__ import annotations

import argparse
from types import ModuleType

from data_prep import (
    collect,
    counterfactual,
    export,
    import_logs,
    pack,
    prepare_logs,
    probe_windows,
    stats,
    tokenize,
    tokenizer,
    windows,
)
from data_prep.environments.base import SimulatorError
from loopwm.records.command import command_parser, exit_status, refuse_renamed


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults of options."""


COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "collect": (collect, "play a simulator and write episodes"),
    "import": (import_logs, "import logs of your own environment as episodes"),
    "prepare": (prepare_logs, "prepare logs for fine-tuning"),
    "pack": (pack, "pack collected episodes into one small file, or unpack such files"),
    "tokenizer": (tokenizer, "train the byte-level BPE and freeze it"),
    "tokenize": (tokenize, "turn episodes into token shards"),
    "windows": (windows, "cut evaluation windows out of episodes"),
    "probe-windows": (probe_windows, "cut windows of what people try first"),
    "stats": (stats, "count what episodes hold"),
    "export": (export, "write episodes as a Hugging Face datasets folder"),
    "counterfactual": (counterfactual, "cut pairs of windows that differ in one earlier action and in the answer"),
}


RENAMED = {
    "spelling": "lab tokenizer-eval",
    "determined": "lab state-sufficiency",
    "hidden": "lab refresh-hidden",
}
"""Commands of earlier releases, and what to run instead."""


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("python -m data_prep", "Prepare data for LoopWM.", COMMANDS, Help)
    refuse_renamed(parser, arguments, RENAMED)
    args = parser.parse_args(arguments)
    return exit_status(lambda: args.run(args), SimulatorError)
