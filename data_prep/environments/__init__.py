"""Simulators behind one interface. A simulator's package is imported only when its environment is created.

An environment is a module or package in this folder with an `ENVIRONMENT`, its class; no other registration is needed.
Other packages register a class by its name in the entry-point group `loopwm.environments`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from data_prep.environments.base import Declared, Environment
from loopwm.records.errors import InputError


def find_environments(folders: Iterable[str]) -> dict[str, type[Environment]]:
    """Return classes by name of this package's modules in these folders."""
    modules = (import_module(f"{__name__}.{module_info.name}") for module_info in iter_modules(folders))
    classes: list[type[Environment]] = [
        vars(module)["ENVIRONMENT"] for module in modules if "ENVIRONMENT" in vars(module)
    ]
    return {environment.name: environment for environment in classes}


def registered_environments() -> dict[str, type[Environment]]:
    """Return classes by name that other packages register."""
    return {point.name: point.load() for point in entry_points(group="loopwm.environments")}


ENVIRONMENTS = registered_environments() | find_environments(__path__)


def make_environment(name: str) -> Environment:
    """Start an environment. Raises InputError for an unknown name or a simulator that cannot start."""
    if name not in ENVIRONMENTS:
        raise InputError(f"environment: must be one of {', '.join(ENVIRONMENTS)}, got {name!r}")
    return ENVIRONMENTS[name]()


def declared(name: str) -> type[Declared]:
    """Return the declarations of an environment, or the defaults for an unknown one."""
    environment = ENVIRONMENTS.get(name)
    return environment if isinstance(environment, type) and issubclass(environment, Declared) else Declared


def family_of(env: str, task: str) -> str:
    """Return a task's family: the task itself in an environment that only logs are known of.

    Raises InputError for an unknown task of a known environment.
    """
    if env not in ENVIRONMENTS:
        return task
    for family, tasks in ENVIRONMENTS[env].families.items():
        if task in tasks:
            return family
    raise InputError(f"task: must belong to a family of {env!r}, got {task!r}")
