"""Environments of frames by name. A simulator's package is imported only when its environment is created."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from loopwm.records.errors import InputError

if TYPE_CHECKING:
    from gymnasium.vector import SyncVectorEnv

    from data_prep.environments.pixels.base import FrameEnvironment, Simulator


@dataclass(frozen=True)
class Maker:
    """Creates a simulator of a class in this folder, named module:class, which is imported only then.

    arguments: of the class, after a game. settings: numbers that each setting may be.
    """

    place: str
    arguments: tuple[object, ...] = ()
    settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __call__(self, *game: str, **settings: float) -> Simulator:
        module, _, name = self.place.partition(":")
        make: Callable[..., Simulator] = getattr(import_module(f"data_prep.environments.pixels.{module}"), name)
        try:
            return make(*game, *self.arguments, **settings)
        except ModuleNotFoundError as error:  # modules are named as the extras that they need
            cure = f"pip install 'loopwm[{module}]'"
            raise InputError(f"{module}: the package {error.name} is not installed: {cure}") from error


SINGLE: dict[str, Callable[..., Simulator]] = {
    "catch": Maker("catch:Catch"),
    "catch-drift": Maker("catch:Catch", ("catch-drift", 0.3)),
    "crafter": Maker("crafter:Crafter", settings={"pixels": (63, 64)}),
    "craftax": Maker("craftax:Craftax", (False,)),
    "craftax-classic": Maker("craftax:Craftax", (True,)),
}
FAMILIES: dict[str, Callable[..., Simulator]] = {
    "atari": Maker("atari:Atari"),
    "minatar": Maker("minatar:MinAtar", settings={"sticky": (0.0, 0.1)}),
    "minigrid": Maker("minigrid:MiniGrid", settings={"pixels": (32, 64)}),
}
"""Environments named FAMILY/GAME or NAME, some with settings: minatar/GAME@sticky=0, crafter@pixels=64."""

FRAME_ENVIRONMENTS = ("catch", "crafter", "minatar/breakout", "atari/Breakout", "minigrid/MemoryS7")
"""Examples for messages and help."""


def is_frame_environment(name: str) -> bool:
    """Return True for the name of an environment of frames, even if its simulator is not installed."""
    return name.partition("@")[0] in SINGLE or name.partition("/")[0] in FAMILIES


def make_frame_environment(name: str) -> FrameEnvironment:
    """Create an environment such as crafter or minatar/breakout.

    Raises InputError for an unknown name, or a package that is not installed: the message names what to install.
    """
    try:
        from data_prep.environments.pixels.base import FrameEnvironment
    except ModuleNotFoundError as error:
        raise InputError(f"{name}: the package {error.name} is not installed: pip install 'loopwm[pixel]'") from error
    plain, _, settings = name.partition("@")
    family, _, game = plain.partition("/")
    if plain in SINGLE:
        return FrameEnvironment(SINGLE[plain](**_settings(SINGLE[plain], name, settings)))
    if family not in FAMILIES:
        expected = ", ".join((*SINGLE, *(f"{known}/GAME" for known in FAMILIES)))
        raise InputError(f"environment: must be one of {expected}, got {name!r}")
    return FrameEnvironment(FAMILIES[family](game, **_settings(FAMILIES[family], name, settings)))


def _settings(maker: Callable[..., Simulator], name: str, text: str) -> dict[str, float]:
    """Parse KEY=VALUE,KEY=VALUE of the maker's settings."""
    known = maker.settings if isinstance(maker, Maker) else {}
    values = {}
    for key, _, value in (part.partition("=") for part in text.split(",") if part):
        if key not in known:
            what = f"expected one of {', '.join(known)}" if known else "it has none"
            raise InputError(f"environment: {name}: unknown setting {key!r}, {what}")
        choices = {f"{choice:g}": choice for choice in known[key]}
        if value not in choices:
            family = re.split("[/@]", name)[0]
            raise InputError(f"{family}: {key}: must be one of {', '.join(choices)}, got {value!r}")
        values[key] = choices[value]
    return values


def make_frame_vector(name: str, num_envs: int) -> SyncVectorEnv:
    """Create a vector of environments that resets in the step in which an episode ends (SAME_STEP).

    Raises InputError as make_frame_environment does.
    """
    first = make_frame_environment(name)  # imported first, so that its errors precede those of gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    makers: list[Callable[[], FrameEnvironment]] = [lambda: first]
    makers += [partial(make_frame_environment, name)] * (num_envs - 1)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
