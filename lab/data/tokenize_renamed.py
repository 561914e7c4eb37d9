"""Convert episodes to token shards, and give things in a share of them other names of their kind (`lab.data.renaming`).

The seed and the episode alone decide which episodes and names. A renamed episode keeps the hash of its original.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from random import Random

from data_prep import tokenize_command
from lab.data.renaming import RenamingError, rename_episode
from loopwm.records.episodes import Episode
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab tokenize-renamed --episodes data/episodes/train --rename 0.5 --seed 1 --out data/shards/renamed"
)


@dataclass(frozen=True)
class RenamingPlan:
    """Share of episodes to rename, 0 to 1, and the seed."""

    share: float
    seed: int

    def carry_out(self, episode: Episode, line: str) -> tuple[Episode, str]:
        """Return the episode, renamed if it is drawn, and the outcome: a text that `describe_renamings` counts.

        line: the episode as it was read, which decides the draw.
        """
        rng = Random(f"{self.seed}/{line}")
        if rng.random() >= self.share:
            return episode, NOT_DRAWN
        try:
            renamed = rename_episode(episode, rng)
        except RenamingError as error:
            return episode, f"{episode.task}, variation {episode.variation}: {error}"
        return renamed, NOTHING if renamed == episode else RENAMED


NOT_DRAWN, NOTHING, RENAMED = "not drawn", "nothing to rename", "renamed"


def describe_renamings(outcomes: Counter[str]) -> str:
    """Describe the outcomes of the renamings in a few words."""
    refused = sorted(outcomes.keys() - {NOT_DRAWN, NOTHING, RENAMED})
    count = sum(outcomes[outcome] for outcome in refused)
    named = f" ({refused[0]})" if refused else ""
    return f"{outcomes[RENAMED]:,} renamed, {outcomes[NOTHING]:,} without such names, {count:,} left as they are{named}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tokenize_command.add_arguments(parser)
    parser.add_argument(
        "--rename", type=float, default=0.0, metavar="SHARE", help="share of episodes whose things are renamed"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the renaming")
    parser.add_argument(
        "--skip-contradictions",
        action="store_true",
        help="leave out episodes whose start contradicts another of their variation",
    )


def run(args: argparse.Namespace) -> None:
    if not 0 <= args.rename <= 1:
        raise InputError("--rename: must be 0 to 1")
    plan = RenamingPlan(args.rename, args.seed)
    skipped: list[str] | None = [] if args.skip_contradictions else None
    outcomes = tokenize_command.convert(args, plan.carry_out, asdict(plan), skipped)
    for line in skipped or ():
        print(f"skipped: {line}", file=sys.stderr)
    if args.rename and not args.check:
        print(describe_renamings(outcomes))
