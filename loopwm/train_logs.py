"""Fine-tune the shipped world model with logs of your own text environment.

LOGS are files or folders of JSON lines, as `loopwm import --help` describes, or episodes that it has imported. The run
folder receives the prepared data, checkpoints, and the model with the lowest dev loss in RUN/model. Rerun the command
to resume an interrupted run, or with more --minutes to continue.

    loopwm train logs.jsonl --out runs/mine --minutes 10

With --config FILE, train from a YAML configuration instead: `loopwm train --config FILE --help`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from loopwm.records.command import Parser, above_zero, doc_parser, exit_status
from loopwm.records.files import PACKAGED

CONFIGURED = "loopwm.training.__main__"
PREPARE, FINE_TUNE = "data_prep.__main__", "loopwm.text.training.fine_tune"
"""Modules of the two steps. They are named, not imported: `loopwm` imports none of the packages above it."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] == "--config" for argument in arguments):
        return import_module(CONFIGURED).main(arguments)
    parser = _parser()
    args = parser.parse_args(arguments)
    if not all((args.model / name).is_file() for name in ("config.json", "tokenizer.json")):
        parser.error(f"--model: must be the folder of a LoopWM checkpoint, got {args.model}")
    data, options = args.out / "data", ["--dev", str(args.dev), "--test", str(args.test), "--seed", str(args.seed)]
    options += ["--tokenizer", str(args.model / "tokenizer.json")]
    prepared = ["prepare", "--logs", *map(str, args.logs), "--env", args.environment, *options, "--out", str(data)]
    if status := import_module(PREPARE).main(prepared):
        return status
    fine_tune = import_module(FINE_TUNE).fine_tune
    return exit_status(lambda: fine_tune(data, args.model, args.out, args.minutes, args.seed))


def _parser() -> Parser:
    parser = doc_parser("loopwm train", __doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOGS", help="files or folders of logs or episodes")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder")
    parser.add_argument("--minutes", type=above_zero, default=10.0, help="length of the training (default: 10)")
    parser.add_argument("--environment", default="logs", metavar="NAME", help="of your environment (default: logs)")
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint to start from (default: the shipped)")
    parser.add_argument("--dev", type=float, default=0.1, metavar="SHARE", help="of goals to stop by (default: 0.1)")
    parser.add_argument("--test", type=float, default=0.1, metavar="SHARE", help="of goals left out (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the splits and the training (default: 0)")
    return parser
