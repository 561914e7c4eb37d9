"""Task families, as the paper groups them, and the paper's mix of windows."""

from __future__ import annotations

from loopwm.records.errors import InputError

FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "scienceworld": {
        "Boil": ("boil",),
        "Chemistry": (
            "chemistry-mix",
            "chemistry-mix-paint-secondary-color",
            "chemistry-mix-paint-tertiary-color",
        ),
        "Conductivity": ("test-conductivity", "test-conductivity-of-unknown-substances"),
        "Find": ("find-animal", "find-living-thing", "find-non-living-thing", "find-plant"),
        "Freeze": ("freeze",),
        "Genetics": ("mendelian-genetics-known-plant", "mendelian-genetics-unknown-plant"),
        "Grow": ("grow-fruit", "grow-plant"),
        "Incline": (
            "inclined-plane-determine-angle",
            "inclined-plane-friction-named-surfaces",
            "inclined-plane-friction-unnamed-surfaces",
        ),
        "LifeStages": ("identify-life-stages-1", "identify-life-stages-2"),
        "Lifespan": (
            "lifespan-longest-lived",
            "lifespan-longest-lived-then-shortest-lived",
            "lifespan-shortest-lived",
        ),
        "Melt": ("melt",),
        "Power": ("power-component", "power-component-renewable-vs-nonrenewable-energy"),
        "StateChange": ("change-the-state-of-matter-of",),
        "Thermometer": (
            "measure-melting-point-known-substance",
            "measure-melting-point-unknown-substance",
            "use-thermometer",
        ),
    },
    "alfworld": {
        "clean": ("pick_clean_then_place_in_recep",),
        "cool": ("pick_cool_then_place_in_recep",),
        "heat": ("pick_heat_then_place_in_recep",),
        "look": ("look_at_obj_in_light",),
        "pick": ("pick_and_place_simple", "pick_two_obj_and_place"),
    },
    "textworld": {"quest": ("quest-small", "quest-medium", "quest-large")},
}

PAPER_MIX: dict[str, dict[str, int]] = {
    "scienceworld": {
        "Incline": 150, "Genetics": 120, "Grow": 65, "Melt": 63, "Chemistry": 27, "Conductivity": 23, "Find": 13,
        "Boil": 9, "Freeze": 8, "Power": 7, "Thermometer": 6, "StateChange": 5, "LifeStages": 2, "Lifespan": 2,
    },
    "alfworld": {"pick": 255, "clean": 96, "cool": 66, "look": 43, "heat": 40},
}  # fmt: skip
"""Windows of each family in the paper's 500, as its percentages reveal."""

_FAMILY = {
    (env, task): family for env, groups in FAMILIES.items() for family, tasks in groups.items() for task in tasks
}


def family_of(env: str, task: str) -> str:
    """Raises InputError for a task that belongs to no family."""
    if (env, task) not in _FAMILY:
        raise InputError(f"task: {task!r} of {env!r} belongs to no family")
    return _FAMILY[env, task]


def scaled_mix(env: str, count: int) -> dict[str, int]:
    """The paper's mix for `count` windows in all; what rounding leaves over goes to the largest remainders."""
    mix = PAPER_MIX[env]
    total = sum(mix.values())
    counts = {family: share * count // total for family, share in mix.items()}
    by_remainder = sorted(mix, key=lambda family: (-(mix[family] * count % total), family))
    for family in by_remainder[: count - sum(counts.values())]:
        counts[family] += 1
    return counts
