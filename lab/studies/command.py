"""Run a study: a question about the model, answered by a protocol written before the run.

Writes results.json, report.md and plots to --out. Rerun the command to resume; finished runs and scores are kept.
docs/evaluation.md describes the studies.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.commands.harness import RunSettings
from eval.commands.run import ascending
from eval.scores.suites import load_suite
from loopwm.records.command import positive
from loopwm.records.template import CONTEXT_KINDS

EXAMPLE = "python -m lab study looping --out runs/studies/looping --workers 2"
PROTOCOLS = Path("configs/studies")
TRAINING = {
    "looping": "looped against unlooped models of the same parameters and of the same FLOPs",
    "ablate": "each part of the training recipe off, or an optional one on",
    "deferral": "deferred decoding against decoding every step and feeding text back",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies = parser.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name, purpose in TRAINING.items():
        _training_arguments(studies.add_parser(name, help=purpose, description=purpose), name)
    purpose = "loss, metrics and FLOPs of a checkpoint at T = 1 .. 2 mu_rec loops"
    depth = studies.add_parser("depth", help=purpose, description=purpose)
    _checkpoint_arguments(depth)
    depth.add_argument("--depths", type=ascending, help="loops to try (default: 1 .. 2 mu_rec)")
    purpose = "loops that exit rules save, against the best fixed depth and against random exits"
    halting = studies.add_parser("halting", help=purpose, description=purpose)
    _checkpoint_arguments(halting)
    halting.add_argument(
        "--rules",
        type=_thresholds,
        nargs="+",
        metavar="RULE=THRESHOLD,..",
        help="what to try, such as gate=0.3,0.5 convergence=0.1 (default: gate and convergence)",
    )
    halting.add_argument("--rule-limit", type=positive, help="most loops of the rules (default: the best fixed depth)")


def _training_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--protocol", type=Path, default=PROTOCOLS / f"{name}.yaml", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--workers", type=positive, default=1, help="runs at a time (default: 1)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol, such as seeds=[0]")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--windows", required=True, help="window file, or the name of a committed suite")
    parser.add_argument("--context", choices=CONTEXT_KINDS, default="snapshot", help="default: snapshot")
    parser.add_argument("--horizons", type=ascending, default=(1, 2, 3, 4, 5), help="such as 1,2,3,4,5 (the default)")
    parser.add_argument("--limit", type=positive, help="sample of this many windows, stratified by family")
    parser.add_argument("--batch-size", type=positive, default=32, help="windows at once (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")


def _thresholds(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, numbers = text.partition("=")
    try:
        return name, tuple(float(number) for number in numbers.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected RULE=NUMBER or RULE=NUMBER,NUMBER,.., got {text!r}") from None


def _settings(args: argparse.Namespace) -> RunSettings:
    return RunSettings(str(args.model), args.context, args.horizons, args.limit, args.seed, args.batch_size)


def run(args: argparse.Namespace) -> None:
    # The studies load torch and matplotlib, which the other commands do without.
    if args.study == "depth":
        from lab.studies.depth_study import run_depth_study

        run_depth_study(args.model, load_suite(args.windows), _settings(args), args.depths, args.out)
    elif args.study == "halting":
        from lab.studies.halting_study import Thresholds, run_halting_study

        thresholds = Thresholds(dict(args.rules)) if args.rules else Thresholds()
        run_halting_study(args.model, load_suite(args.windows), _settings(args), thresholds, args.rule_limit, args.out)
    else:
        from lab.studies.study_protocol import load_protocol
        from lab.studies.text_protocol import TextProtocol
        from lab.studies.training_study import run_training_study

        protocol = load_protocol(TextProtocol, args.protocol, args.overrides)
        run_training_study(args.study, protocol, args.out, args.workers)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")
