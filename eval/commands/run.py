"""Evaluate a checkpoint, a baseline or a language model on a suite of windows.

Writes results.json, report.md and predictions.jsonl to --out. A window that the model cannot be shown (too long, or
without what the context needs) is refused and counted, and the others are scored. The same command resumes an
interrupted run; a folder of other arguments is an error.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.models.options import ModelOptions, add_model_arguments, make_predictor
from loopwm.records.command import positive
from loopwm.records.template import CONTEXT_KINDS

EXAMPLE = "python -m eval run --model copy --suite scienceworld-500 --context observed --out runs/eval/copy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--suite", required=True, help="name of a committed suite, or a window file")
    parser.add_argument("--context", choices=CONTEXT_KINDS, required=True, help="what the model is shown of a window")
    parser.add_argument("--horizons", type=ascending, default=(1, 2, 3, 4, 5), help="such as 1,2,3,4,5 (the default)")
    parser.add_argument("--limit", type=positive, help="sample of this many windows, stratified by family")
    parser.add_argument(
        "--seen", type=Path, metavar="FILE", help="table of build-seen (default: the suite's committed one, if any)"
    )
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows at once (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")


def run(args: argparse.Namespace) -> None:
    # imported late: the packages of scores take most of a second, and `--help` needs none
    from eval.commands.harness import RunSettings, evaluate, sample_windows
    from eval.models.base import Trained
    from eval.scores.rows import OVERALL
    from eval.scores.seen import find_seen, seen_by_checkpoint
    from eval.scores.suites import load_suite
    from eval.scores.tables import UNKNOWN, describe_windows, render_comparison_table, with_bounds

    suite = load_suite(args.suite)
    settings = RunSettings(args.model, args.context, args.horizons, args.limit, args.seed, args.batch_size)
    seen_table = find_seen(suite, args.seen)
    windows = sample_windows(suite, settings)
    predictor = make_predictor(args.model, windows, ModelOptions.of(args), args.context, args.horizons)
    if isinstance(predictor, Trained):
        seen_table = seen_by_checkpoint(suite, predictor.training_episodes, seen_table, args.seen)
    results = evaluate(predictor, suite, windows, settings, args.out, seen_table)
    print(render_comparison_table([results]), end="")
    print(f"\n{describe_windows(results)}")
    last = [row for row in results["rows"] if row["family"] == OVERALL][-1]  # the largest horizon
    print(f"Exact match at horizon {last['horizon']}: {with_bounds(last, 'em')}, 95 % over games.")
    if (size := len(suite.windows)) > len(windows):
        print(f"A sample of {len(windows)} of {size} windows; without --limit all are predicted.")
    if results["seen_in"] is None:
        print(f"\n{UNKNOWN}")
    if results["unanswered"]:
        print(f"\n{results['unanswered']} answers did not come: they count as wrong. The same command asks again.")


def ascending(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))
