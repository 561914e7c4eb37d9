"""Families of ScienceWorld's tasks, grouped as in the paper."""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {
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
}
