"""Imagine text and pixel environments with looped transformers: one command for every part of LoopWM.

Each command is also a module: `loopwm serve` is `python -m serve`.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from typing import NoReturn

from loopwm import __version__
from loopwm.records.command import run_main


@dataclass(frozen=True)
class Command:
    """A subcommand. words: the module whose `main` runs it, and its first arguments.

    Modules are named, not imported: they bring torch or a simulator, which takes seconds, and `loopwm` imports none of
    the packages above it.
    """

    words: str
    purpose: str
    example: str


COMMANDS = {
    "serve": Command("serve.__main__", "serve a checkpoint over HTTP", "--port 8000"),
    "play": Command("serve.__main__ play", "act in an imagined world, in the terminal", "--example find/0006"),
    "mcp": Command("serve.__main__ mcp", "imagined worlds as tools of an agent", "--url http://127.0.0.1:8000"),
    "collect": Command(
        "data_prep.__main__ collect",
        "play real environments",
        "scienceworld --split train --policy gold --out data/episodes/gold",
    ),
    "import": Command(
        "data_prep.__main__ import",
        "import logs of your own environment",
        "--logs logs.jsonl --env shop --out data/logs",
    ),
    "tokenize": Command(
        "data_prep.__main__ tokenize",
        "turn episodes into training shards",
        "--episodes data/episodes/gold --out data/shards/gold",
    ),
    "windows": Command(
        "data_prep.__main__ windows",
        "cut evaluation windows out of episodes",
        "--episodes data/episodes/gold --count 50 --out data/windows.jsonl.gz",
    ),
    "train": Command(
        "loopwm.train_logs", "fine-tune with your logs, or train from a configuration", "logs.jsonl --out runs/mine"
    ),
    "adopt": Command(
        "loopwm.text.adopt_command",
        "make a looped model of a pretrained decoder",
        "Qwen3-0.6B --out runs/adopted --prelude 4 --block 8 --coda 4",
    ),
    "export": Command(
        "loopwm.text.export_command",
        "export a checkpoint of a run as a model",
        "--checkpoint runs/mine/checkpoints/step-00000400 --out runs/mine-400",
    ),
    "eval": Command(
        "eval.__main__",
        "score models on a suite",
        "run --model copy --suite scienceworld-dev --context observed --out runs/copy",
    ),
}

WIDTH = max(map(len, COMMANDS))


def overview() -> str:
    """Return the text of `loopwm --help`."""
    lines = ["usage: loopwm [--version] COMMAND ...", "", (__doc__ or "").strip(), "", "commands:"]
    for name, command in COMMANDS.items():
        lines += [f"  {name:{WIDTH}}  {command.purpose}", f"  {'':{WIDTH}}  example: loopwm {name} {command.example}"]
    completion = f"complete -o default -W '{' '.join(COMMANDS)}' loopwm"
    return "\n".join([*lines, "", "options of a command: loopwm COMMAND --help", f"completion in bash: {completion}"])


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for an unknown one, after one line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        cure = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(COMMANDS)}"
        print(f"error: COMMAND: {name!r} is unknown, {cure}", file=sys.stderr)
        return 2
    module, *first = COMMANDS[name].words.split()
    return run_main(module, "train", [*first, *rest])  # other packages name their own extra


def run() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    run()
