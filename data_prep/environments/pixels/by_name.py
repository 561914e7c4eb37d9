"""Environments of frames by name. A simulator's package is imported only when its environment is created."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

from loopwm.records.errors import InputError

if TYPE_CHECKING:
    from gymnasium.vector import SyncVectorEnv

    from data_prep.environments.pixels.base import FrameEnvironment, Simulator


def _crafter(pixels: str = "63") -> Simulator:
    from data_prep.environments.pixels.crafter import Crafter

    return Crafter(int(number("crafter", "pixels", pixels, (63, 64))))


def _craftax(classic: bool) -> Simulator:
    from data_prep.environments.pixels.craftax import Craftax

    return Craftax(classic)


def _catch() -> Simulator:
    from data_prep.environments.pixels.catch import Catch

    return Catch()


def _catch_drift() -> Simulator:
    from data_prep.environments.pixels.catch import DRIFT, Catch

    return Catch("catch-drift", DRIFT)


def _minatar(game: str, sticky: str = "0.1") -> Simulator:
    from data_prep.environments.pixels.minatar import MinAtar

    return MinAtar(game, number("minatar", "sticky", sticky, (0.0, 0.1)))


def _atari(game: str) -> Simulator:
    from data_prep.environments.pixels.atari import Atari

    return Atari(game)


def _minigrid(task: str, pixels: str = "64") -> Simulator:
    from data_prep.environments.pixels.minigrid import MiniGrid

    return MiniGrid(task, int(number("minigrid", "pixels", pixels, (32, 64))))


def _vizdoom(scenario: str) -> Simulator:
    from data_prep.environments.pixels.vizdoom import VizDoom

    return VizDoom(scenario)


SINGLE: dict[str, Callable[..., Simulator]] = {
    "catch": _catch,
    "catch-drift": _catch_drift,
    "crafter": _crafter,
    "craftax": partial(_craftax, False),
    "craftax-classic": partial(_craftax, True),
}
FAMILIES: dict[str, Callable[..., Simulator]] = {
    "atari": _atari,
    "minatar": _minatar,
    "minigrid": _minigrid,
    "vizdoom": _vizdoom,
}
"""Environments named FAMILY/GAME or NAME, some with settings: minatar/GAME@sticky=0, crafter@pixels=64."""

FRAME_ENVIRONMENTS = ("catch", "crafter", "minatar/breakout", "atari/Breakout", "minigrid/MemoryS7", "vizdoom/basic")
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
    if maker := SINGLE.get(plain):
        return FrameEnvironment(maker(**_settings(signature(maker).parameters, name, settings)))
    family, _, game = plain.partition("/")
    if family not in FAMILIES:
        expected = ", ".join((*SINGLE, *(f"{known}/GAME" for known in FAMILIES)))
        raise InputError(f"environment: must be one of {expected}, got {name!r}")
    _, *known = signature(FAMILIES[family]).parameters
    return FrameEnvironment(FAMILIES[family](game, **_settings(known, name, settings)))


def _settings(known: Collection[str], name: str, text: str) -> dict[str, str]:
    """Parse KEY=VALUE,KEY=VALUE of these keys."""
    pairs = dict(part.partition("=")[::2] for part in text.split(",") if text)
    for key in pairs:
        if key not in known:
            what = f"expected one of {', '.join(known)}" if known else "it has none"
            raise InputError(f"environment: {name}: unknown setting {key!r}, {what}")
    return pairs


def number(family: str, key: str, text: str, choices: tuple[float, ...]) -> float:
    """Parse a setting that is one of a few numbers."""
    for choice in choices:
        if text == f"{choice:g}":
            return choice
    raise InputError(f"{family}: {key}: must be one of {', '.join(f'{choice:g}' for choice in choices)}, got {text!r}")


def make_frame_vector(name: str, num_envs: int) -> SyncVectorEnv:
    """Create a vector of environments that resets in the step in which an episode ends (SAME_STEP).

    Raises InputError as make_frame_environment does.
    """
    first = make_frame_environment(name)  # imported first, so that its errors precede those of gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    makers: list[Callable[[], FrameEnvironment]] = [lambda: first]
    makers += [partial(make_frame_environment, name)] * (num_envs - 1)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
