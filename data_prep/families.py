"""Families of tasks, and the paper's mix of windows over families."""

from __future__ import annotations

from data_prep.environments import ENVIRONMENTS
from loopwm.records.errors import InputError

PAPER_MIX: dict[str, dict[str, int]] = {
    "scienceworld": {
        "Incline": 150, "Genetics": 120, "Grow": 65, "Melt": 63, "Chemistry": 27, "Conductivity": 23, "Find": 13,
        "Boil": 9, "Freeze": 8, "Power": 7, "Thermometer": 6, "StateChange": 5, "LifeStages": 2, "Lifespan": 2,
    },
    "alfworld": {"pick": 255, "clean": 96, "cool": 66, "look": 43, "heat": 40},
}  # fmt: skip
"""Windows of each family in the paper's 500, derived from its percentages."""


def family_of(env: str, task: str) -> str:
    """Return a task's family: the task itself in an environment that only logs are known of.

    Raises:
        InputError: for an unknown task of a known environment.
    """
    if env not in ENVIRONMENTS:
        return task
    for family, tasks in ENVIRONMENTS[env].families.items():
        if task in tasks:
            return family
    raise InputError(f"task: must belong to a family of {env!r}, got {task!r}")


def scaled_mix(env: str, count: int) -> dict[str, int]:
    """Return the paper's mix for `count` windows in all; the rest after rounding goes to the largest remainders."""
    mix = PAPER_MIX[env]
    total = sum(mix.values())
    counts = {family: share * count // total for family, share in mix.items()}
    by_remainder = sorted(mix, key=lambda family: (-(mix[family] * count % total), family))
    for family in by_remainder[: count - sum(counts.values())]:
        counts[family] += 1
    return counts
