"""Simulators behind one interface. A simulator's package is imported only when its environment is made."""

from __future__ import annotations

from data_prep.environments.alfworld.environment import AlfWorld
from data_prep.environments.base import Environment
from data_prep.environments.scienceworld.environment import ScienceWorld
from data_prep.environments.textworld import TextWorld
from loopwm.records.errors import InputError

ENVIRONMENTS: dict[str, type[Environment]] = {
    ScienceWorld.name: ScienceWorld,
    AlfWorld.name: AlfWorld,
    TextWorld.name: TextWorld,
}


def make_environment(name: str) -> Environment:
    """Starts an environment. Raises InputError for an unknown name or a simulator that cannot start."""
    if name not in ENVIRONMENTS:
        raise InputError(f"environment: unknown {name!r}, expected one of {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]()
