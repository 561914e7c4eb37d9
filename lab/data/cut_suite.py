"""Cut the committed suites out of episodes, and read windows again.

Within a family the episode is drawn first, then the start, so that long episodes do not dominate.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from data_prep.environments import family_of
from data_prep.windows import Cut, draw_starts, read_sorted, write_cuts
from loopwm.records.episodes import Episode
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines

EXAMPLE = (
    "python -m lab cut-suite --episodes data/episodes/test-gold --suite scienceworld-500 "
    "--out eval/suites/scienceworld-500.jsonl.gz"
)

PAPER_MIX: dict[str, dict[str, int]] = {
    "scienceworld": {
        "Incline": 150, "Genetics": 120, "Grow": 65, "Melt": 63, "Chemistry": 27, "Conductivity": 23, "Find": 13,
        "Boil": 9, "Freeze": 8, "Power": 7, "Thermometer": 6, "StateChange": 5, "LifeStages": 2, "Lifespan": 2,
    },
    "alfworld": {"pick": 255, "clean": 96, "cool": 66, "look": 43, "heat": 40},
}  # fmt: skip
"""Windows of each family in the paper's 500, derived from its percentages."""


_PLAYED = ("id", "env", "task", "variation", "history", "actions", "observations")
"""Fields of a window that replaying needs."""


def scaled_mix(env: str, count: int) -> dict[str, int]:
    """Return the paper's mix for `count` windows in all; the rest after rounding goes to the largest remainders."""
    mix = PAPER_MIX[env]
    total = sum(mix.values())
    counts = {family: share * count // total for family, share in mix.items()}
    by_remainder = sorted(mix, key=lambda family: (-(mix[family] * count % total), family))
    for family in by_remainder[: count - sum(counts.values())]:
        counts[family] += 1
    return counts


@dataclass(frozen=True)
class Recipe:
    """Committed set of windows: source of its episodes, and mix of families."""

    env: str
    split: str
    policy: str
    horizon: int
    mix: Mapping[str, int]


DEV_WINDOWS = 300
"""Windows of a dev suite."""

RECIPES = {
    "scienceworld-500": Recipe("scienceworld", "test", "gold", 5, PAPER_MIX["scienceworld"]),
    "scienceworld-500-noisy": Recipe("scienceworld", "test", "noisy-expert", 5, PAPER_MIX["scienceworld"]),
    "alfworld-500": Recipe("alfworld", "valid_seen", "expert", 5, PAPER_MIX["alfworld"]),
    "alfworld-500-noisy": Recipe("alfworld", "valid_seen", "noisy-expert", 5, PAPER_MIX["alfworld"]),
    "scienceworld-dev": Recipe("scienceworld", "dev", "gold", 5, scaled_mix("scienceworld", DEV_WINDOWS)),
    "scienceworld-dev-noisy": Recipe("scienceworld", "dev", "noisy-expert", 5, scaled_mix("scienceworld", DEV_WINDOWS)),
    "alfworld-dev": Recipe("alfworld", "dev", "expert", 5, scaled_mix("alfworld", DEV_WINDOWS)),
    "alfworld-dev-noisy": Recipe("alfworld", "dev", "noisy-expert", 5, scaled_mix("alfworld", DEV_WINDOWS)),
}


def cut_mix(episodes: Iterable[Episode], mix: Mapping[str, int], horizon: int, seed: int, name: str) -> list[Cut]:
    """Cut windows in a mix of families. Raises InputError naming a family with too few episodes."""
    by_family: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_family[family_of(episode.env, episode.task)].append(episode)
    cuts = []
    for family, count in mix.items():
        rng = Random(f"{seed}/{name}/{family}")
        try:
            pairs = draw_starts(by_family[family], count, horizon, rng)
        except InputError as error:
            raise InputError(f"--episodes: family {family}: {error}") from error
        cuts += [Cut(episode, now, f"{name}/{family.lower()}/{i:04d}") for i, (episode, now) in enumerate(pairs)]
    return cuts


def check_suite(suite: Recipe, episodes: Iterable[Episode]) -> None:
    """Raise InputError for an episode that the suite must not be cut from."""
    for episode in episodes:
        for field in ("env", "split", "policy"):
            value, wanted = getattr(episode, field), getattr(suite, field)
            if value != wanted:
                raise InputError(
                    f"--episodes: {field}: must be {wanted!r} for the suite, got {value!r} in {episode.task}"
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--suite", choices=RECIPES, required=True, help="suite, with its mix and horizon")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl.gz")


def run(args: argparse.Namespace) -> None:
    suite, episodes = RECIPES[args.suite], read_sorted(args.episodes)
    check_suite(suite, episodes)
    write_cuts(args.out, cut_mix(episodes, suite.mix, suite.horizon, args.seed, args.suite), suite.horizon, True)


def read_windows(path: Path) -> list[dict[str, Any]]:
    """Read windows of one environment. Raises InputError naming file, line and field."""
    windows = []
    for number, window in read_json_lines(path):
        if missing := [field for field in _PLAYED if field not in window]:
            raise InputError(f"{path}: line {number}: {missing[0]}: missing")
        windows.append(window)
    names = sorted({window["env"] for window in windows})
    if len(names) != 1:
        raise InputError(f"{path}: must be of one environment, got {', '.join(names) or 'none'}")
    return windows
