"""`python -m data_prep COMMAND`."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from data_prep import (
    collect,
    counterfactual,
    determined,
    export,
    hidden,
    pack,
    spelling,
    stats,
    tokenize,
    tokenizer,
    windows,
)
from data_prep.environments.base import SimulatorError
from loopwm.records.errors import InputError

COMMANDS: dict[str, tuple[ModuleType, str, str]] = {
    "collect": (
        collect,
        "play a simulator and write episodes",
        "python -m data_prep collect scienceworld --split train --policy gold --episodes-per-task 40 --workers 2 "
        "--out data/episodes/train-gold",
    ),
    "pack": (
        pack,
        "pack collected episodes into one small file, or unpack such files",
        "python -m data_prep pack --folder data/episodes/train-gold --out train-gold.tar.xz",
    ),
    "tokenizer": (
        tokenizer,
        "train the byte-level BPE and freeze it",
        "python -m data_prep tokenizer --episodes data/episodes/train --alfworld-games data/alfworld",
    ),
    "spelling": (
        spelling,
        "measure vocabularies: tokens a text, and names spelled unlike before",
        "python -m data_prep spelling --tokenizers loopwm/text/tokenizer.json --episodes data/episodes/dev-gold",
    ),
    "tokenize": (
        tokenize,
        "turn episodes into token shards",
        "python -m data_prep tokenize --episodes data/episodes/train --out data/shards/train --workers 2",
    ),
    "windows": (
        windows,
        "cut evaluation windows out of episodes",
        "python -m data_prep windows --episodes data/episodes/test-gold --suite scienceworld-500 --seed 0 "
        "--out eval/suites/scienceworld-500.jsonl.gz",
    ),
    "determined": (
        determined,
        "measure how far states determine answers",
        "python -m data_prep determined --episodes data/episodes/train --examples 1",
    ),
    "stats": (
        stats,
        "count what episodes hold",
        "python -m data_prep stats --episodes data/episodes --out docs/statistics",
    ),
    "export": (
        export,
        "write episodes as a Hugging Face datasets folder",
        "python -m data_prep export --episodes data/episodes/train --out data/export",
    ),
    "hidden": (
        hidden,
        "read the hidden states of windows anew",
        "python -m data_prep hidden --windows eval/suites/scienceworld-500.jsonl.gz "
        "--out eval/suites/scienceworld-500.jsonl.gz",
    ),
    "counterfactual": (
        counterfactual,
        "cut pairs of windows that differ in one earlier action and in the answer",
        "python -m data_prep counterfactual --windows eval/suites/scienceworld-500.jsonl.gz --count 200 "
        "--out eval/suites/scienceworld-counterfactual.jsonl.gz",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep", description="Prepare data for LoopWM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, purpose, example) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=(module.__doc__ or "").split("\n\n")[0],
            epilog=f"example: {example}",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        args.run(args)
    except (InputError, SimulatorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"error: {error.filename or args.command}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
