"""Registered environments: one, or a vector that steps together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from loopwm.records.files import PACKAGED
from loopwm.records.template import LONGEST_OBSERVATION, ContextKind
from loopwm.worlds.gym import MAX_ACTION, MAX_OBSERVATION, AnyText, ImaginedTextEnv, step_info
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.protocol import RowWorlds
from loopwm.worlds.starts import SCIENCEWORLD, Start, Starts, read_starts

if TYPE_CHECKING:
    from loopwm.worlds.local import LocalWorlds


def make_env(max_steps: int = 50, render_mode: str | None = None, **options: Any) -> ImaginedTextEnv:
    """Make an imagined environment.

    Args:
        max_steps: of an episode.
        render_mode: of Gymnasium.
        options: as in `make_worlds_and_starts`.
    """
    return ImaginedTextEnv(*make_worlds_and_starts(**options), max_steps, render_mode)


def make_vector_env(num_envs: int, max_steps: int = 50, **options: Any) -> ImaginedVectorEnv:
    """Make a vector of environments as `make_env` that step together: one request to a service, or one batch."""
    return ImaginedVectorEnv(*make_worlds_and_starts(**options), num_envs, max_steps)


def make_worlds_and_starts(
    url: str | None = None,
    model: str | None = None,
    starts: str | Path = SCIENCEWORLD,
    context: ContextKind = "observed",
    key: str | None = None,
    max_new_tokens: int = LONGEST_OBSERVATION,
) -> tuple[RowWorlds, list[Start]]:
    """Return the worlds of an environment, and the starts of its episodes.

    Args:
        url: of a service with the worlds, None for this process.
        model: name in the service, None for its only one; in this process a checkpoint folder, None for the packaged
            one.
        starts: window file.
        context: what of its windows is shown.
        key: of the service.
        max_new_tokens: of an observation.

    Raises FormatError like `read_starts`.
    """
    places, worlds = read_starts(starts, context), make_worlds(url, key, model, max_new_tokens)
    return worlds, places


def make_worlds(
    url: str | None, key: str | None, model: str | None, max_new_tokens: int = LONGEST_OBSERVATION
) -> HttpWorlds | LocalWorlds:
    """Return worlds in a service, or in this process without a url. url, key, model: as in `make_worlds_and_starts`."""
    if url is not None:
        client = Client(url, key)
        return HttpWorlds(client, model or client.model(), max_new_tokens)
    from loopwm.text.world import WorldModel
    from loopwm.worlds.local import LocalWorlds  # imports torch, which clients of a service need not have

    return LocalWorlds(WorldModel.from_pretrained(model or PACKAGED), max_new_tokens=max_new_tokens)


class ImaginedVectorEnv(VectorEnv[tuple[str, ...], tuple[str, ...], NDArray[Any]]):
    """Environments whose worlds step together.

    The step after the end of an episode resets it and ignores the action (Gymnasium's NEXT_STEP).
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - the base class declares it so

    def __init__(self, worlds: RowWorlds, starts: Sequence[Start], num_envs: int, max_steps: int) -> None:
        """Build the environments. Raises ValueError for a number that is not above zero."""
        for name, value in (("num_envs", num_envs), ("max_steps", max_steps)):
            if value < 1:
                raise ValueError(f"{name}: must be above 0, got {value}")
        self.num_envs = num_envs
        self.single_observation_space = AnyText(MAX_OBSERVATION, min_length=0)
        self.single_action_space = AnyText(MAX_ACTION)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._worlds, self._starts, self._max_steps = worlds, Starts(starts), max_steps
        self._options: dict[str, Any] = {}
        self._rngs = [np_random()[0] for _ in range(num_envs)]
        self._seen: list[str] = []
        self._steps = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Reset all environments. Raises ValueError for a list of seeds of another length.

        seed: of the first environment, others get the numbers after it; or one for each environment.
        options: as in `ImaginedTextEnv`, for all their episodes until the next reset.
        """
        self._seed(seed)
        starts = [self._starts.draw(rng, options or {}) for rng in self._rngs]  # may refuse the options
        self._options = options or {}
        self._worlds.begin([start.context for start in starts])
        self._seen = [start.observation for start in starts]
        self._steps[:], self._over[:] = 0, False
        return tuple(self._seen), self._infos({row: start.info() for row, start in enumerate(starts)})

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments. Raises ValueError for actions outside the space, and before the first reset."""
        if not self._seen:
            raise ValueError("step: must follow reset; no episode has begun")
        _check(actions, self.num_envs)
        rewards, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        infos: dict[int, dict[str, Any]] = {}
        fresh, going = np.flatnonzero(self._over), np.flatnonzero(~self._over).tolist()
        if len(fresh):
            infos |= self._begin_anew(fresh)
        steps = self._worlds.step([actions[row] for row in going], rows=going) if going else []
        for row, imagined in zip(going, steps, strict=True):
            full, terminated[row], infos[row] = imagined.finish == "full", imagined.ends, step_info(imagined)
            self._steps[row] += 1
            self._seen[row] = self._seen[row] if full else imagined.observation
            rewards[row] = imagined.reward or 0.0
            truncated[row] = full or (not terminated[row] and self._steps[row] >= self._max_steps)
            self._over[row] = terminated[row] or truncated[row]
        return tuple(self._seen), rewards, terminated, truncated, self._infos(infos)

    def close_extras(self, **kwargs: Any) -> None:
        self._worlds.close()

    def _begin_anew(self, rows: NDArray[Any]) -> dict[int, dict[str, Any]]:
        starts = {int(row): self._starts.draw(self._rngs[row], self._options) for row in rows}
        self._worlds.restart(list(starts), [start.context for start in starts.values()])
        for row, start in starts.items():
            self._seen[row] = start.observation
        self._steps[rows], self._over[rows] = 0, False
        return {row: start.info() for row, start in starts.items()}

    def _seed(self, seed: int | list[int | None] | None) -> None:
        if not isinstance(seed, list):
            seed = [None if seed is None else seed + row for row in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed: must be {self.num_envs}, one an environment, got {len(seed)}")
        for row, one in enumerate(seed):
            if one is not None:
                self._rngs[row] = np_random(one)[0]

    def _infos(self, by_row: dict[int, dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for row, info in sorted(by_row.items()):
            infos = self._add_info(infos, info, row)
        return infos


def _check(actions: Sequence[str], count: int) -> None:
    if len(actions) != count:
        raise ValueError(f"actions: must be {count}, one an environment, got {len(actions)}")
    for place, action in enumerate(actions):
        if not isinstance(action, str) or not action.strip() or len(action) > MAX_ACTION:
            raise ValueError(f"actions[{place}]: must be a text of 1 to {MAX_ACTION} characters, got {action!r}")
