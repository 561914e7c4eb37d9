"""Names of ScienceWorld's things, which are the longest matches of a committed list, and families of its tasks.

The list holds its objects, substances and locations (`entities.txt`, built by `python -m lab build-entities`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from loopwm.records.names import NameList, Names

ENTITIES = Path(__file__).with_name("entities.txt")


@cache
def name_list() -> NameList:
    return NameList(ENTITIES.read_text(encoding="utf-8").splitlines())


NAMES = Names(
    named=lambda text: name_list().longest(text),
    mentioned=lambda text: name_list().anywhere(text),
    split=lambda text: name_list().split(text),
)


FAMILIES: dict[str, tuple[str, ...]] = {
    "Boil": ("boil",),
    "Chemistry": ("chemistry-mix", "chemistry-mix-paint-secondary-color", "chemistry-mix-paint-tertiary-color"),
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
    "Lifespan": ("lifespan-longest-lived", "lifespan-longest-lived-then-shortest-lived", "lifespan-shortest-lived"),
    "Melt": ("melt",),
    "Power": ("power-component", "power-component-renewable-vs-nonrenewable-energy"),
    "StateChange": ("change-the-state-of-matter-of",),
    "Thermometer": (
        "measure-melting-point-known-substance",
        "measure-melting-point-unknown-substance",
        "use-thermometer",
    ),
}
"""Families of ScienceWorld's tasks, grouped as in the paper."""
