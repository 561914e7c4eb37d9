"""Look-ahead: compare an agent that imagines candidate plans with the same agent without a model.

`lab/studies/planner.py` describes games, arms and scores. Rerun the command to resume.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loopwm.records.command import above_zero, positive

EXAMPLE = (
    "python -m lab plan --train-episodes data/episodes/scienceworld-train-gold --split dev --episodes 11 --seed 1 "
    "--out runs/planner-dev"
)
SHORT = (
    "lifespan-longest-lived", "lifespan-shortest-lived", "lifespan-longest-lived-then-shortest-lived",
    "find-non-living-thing", "power-component", "find-plant", "find-animal", "find-living-thing",
    "identify-life-stages-2", "chemistry-mix-paint-secondary-color", "use-thermometer",
)  # fmt: skip
"""Tasks of ScienceWorld whose gold dev episodes have fewer than 20 steps on average."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--train-episodes",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="episodes that the agent retrieves from",
    )
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder (default: %(default)s)")
    add("--env", default="scienceworld", help="real world: scienceworld, alfworld, textworld (default: %(default)s)")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="default: eleven short ones of ScienceWorld, else all")
    add("--split", default="test", help="split of the variations (default: %(default)s)")
    add("--episodes", type=positive, default=110, help="number of games, tasks in turn (default: %(default)s)")
    add("--max-steps", type=positive, default=40, help="environment steps of a game (default: %(default)s)")
    add("--candidates", type=positive, default=4, help="maximum plans per decision (default: %(default)s)")
    add("--horizon", type=_horizon, default=4, help="K, the actions of a plan, at least 2 (default: %(default)s)")
    add(
        "--weight",
        type=above_zero,
        default=0.2,
        help="weight of agreement relative to similarity (default: %(default)s)",
    )
    add("--arms", nargs="+", default=[], metavar="ARM", help="arms to play, the reference first; default: all")
    add("--seed", type=int, default=0, help="seed of variations and random plans (default: 0)")


def _horizon(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("expected at least 2: look-ahead-1 is an arm of its own")
    return int(text)


def run(args: argparse.Namespace) -> None:
    from lab.studies.planner import PlanSettings, run_planner  # torch, which the other commands do without

    tasks = args.tasks or (SHORT if args.env == "scienceworld" else ())
    settings = PlanSettings(
        args.env, tuple(tasks), args.split, args.episodes, args.max_steps, args.seed, args.candidates, args.horizon,
        args.weight,
    )  # fmt: skip
    run_planner(args.model, args.train_episodes, settings, args.arms, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")
