"""Evaluate a checkpoint or a floor on a suite of windows.

Writes results.json, report.md and predictions.jsonl to --out. Killed and started again with the same arguments it goes
on where it was; a folder made with other arguments is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.baselines import Copy, Extrapolate, load_markov
from eval.errors import EvalError
from eval.harness import Settings, evaluate, select_windows
from eval.predictors import Predictor
from eval.report import render_comparison_table
from eval.windows import Window, load_suite
from loopwm.text.format import REGIMES

EXAMPLE = "python -m eval run --model markov --suite scienceworld-500 --context observed --out runs/eval/markov"
_EPISODES_HELP = "build the table of markov and extrapolate from these (default: the committed one)"
FLOORS = ("copy", "markov", "extrapolate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"checkpoint folder, or one of {', '.join(FLOORS)}")
    parser.add_argument("--suite", required=True, help="name of a committed suite, or a window file")
    parser.add_argument("--context", choices=REGIMES, required=True, help="what of a window the model is shown")
    parser.add_argument("--horizons", type=ascending, default=(1, 2, 3, 4, 5), help="such as 1,2,3,4,5 (the default)")
    parser.add_argument("--limit", type=positive, help="sample of this many windows, stratified by family")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--depth", type=positive, help="loops of every pass (default: the checkpoint's)")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows at once (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--train-episodes", type=Path, nargs="+", default=[], metavar="FILE", help=_EPISODES_HELP)


def run(args: argparse.Namespace) -> None:
    suite = load_suite(args.suite)
    settings = Settings(args.model, args.context, args.horizons, args.limit, args.seed, args.batch_size)
    windows = select_windows(suite, settings)
    predictor = make_predictor(args.model, windows, args.depth, args.train_episodes)
    results = evaluate(predictor, suite, windows, settings, args.out)
    print(render_comparison_table([results]), end="")


def make_predictor(model: str, windows: Sequence[Window], depth: int | None, train_episodes: list[Path]) -> Predictor:
    """A floor by its name, or a checkpoint by its folder. Raises EvalError naming the option at fault."""
    if train_episodes and model not in ("markov", "extrapolate"):
        raise EvalError(f"--train-episodes: {model!r} takes no table")
    if model not in FLOORS:
        return _checkpoint(Path(model), depth)
    if depth is not None:
        raise EvalError(f"--depth: {model!r} has no loops")
    if model == "copy":
        return Copy()
    markov = load_markov(windows, train_episodes)
    return markov if model == "markov" else Extrapolate(markov)


def _checkpoint(folder: Path, depth: int | None) -> Predictor:
    if not folder.is_dir():
        raise EvalError(f"--model: {str(folder)!r} is neither a checkpoint folder nor one of {', '.join(FLOORS)}")
    from eval.models import CheckpointPredictor  # torch: seconds to import, and the floors run without it

    return CheckpointPredictor(folder, depth)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def ascending(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))
