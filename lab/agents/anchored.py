"""Imagined worlds and environments that are resynchronised with real ones every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

import gymnasium
import numpy as np

from loopwm.records.template import Context
from loopwm.worlds.gym import ImaginedTextEnv
from loopwm.worlds.protocol import Imagined, Worlds
from loopwm.worlds.starts import Start, Starts


class Real(Protocol):
    """A real environment with Gymnasium's interface."""

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, Mapping[str, Any]]: ...


class AnchoredWorlds:
    """Rows that step their real environments every `every` steps, and when one is imagined to end, is full or doubtful.

    Doubtful is what is trusted less than `least_trust`; a text that was cut has no trust. The real environments then
    take the actions since the last such step, and each world observes the results. `real` is True if the last step was
    one: its results are real, and a continuation of 0 is the end, which stays.
    """

    def __init__(self, worlds: Worlds, reals: Sequence[Real], every: int, least_trust: float = 0.0) -> None:
        """Pair worlds with real environments, one a row, at the state where the row begins. Raises ValueError."""
        if every < 1:
            raise ValueError(f"every: must be above 0, got {every}")
        self.real = True
        self._worlds, self._reals, self._every, self._least_trust = worlds, reals, every, least_trust
        self._taken: list[Sequence[str]] = []
        self._over: dict[int, Imagined] = {}

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return self._worlds.steps_cut

    def begin(self, contexts: Sequence[Context]) -> None:
        """Begin the rows. Raises ValueError unless there is one context for each real environment."""
        if len(contexts) != len(self._reals):
            raise ValueError(f"contexts: must be {len(self._reals)}, one a real environment, got {len(contexts)}")
        self._worlds.begin(contexts)
        self._taken, self._over, self.real = [], {}, True

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        imagined = self._worlds.step(actions, decode)
        self._taken.append(actions)
        due = any(self._is_due(one) for row, one in enumerate(imagined) if row not in self._over)
        self.real = len(self._taken) == self._every or due
        results = self._look() if self.real else imagined
        return [self._over.get(row, one) for row, one in enumerate(results)]

    def fork(self, rows: Sequence[int]) -> Worlds:
        """Fork the imagined worlds only: there is one real environment a row."""
        return self._worlds.fork(rows)

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        """Append steps that the caller took in the real environments."""
        self._worlds.observe(actions, observations)
        self._taken = []

    def close(self) -> None:
        self._worlds.close()

    def _is_due(self, imagined: Imagined) -> bool:
        return imagined.finish == "full" or imagined.ends or (imagined.trust or 0.0) < self._least_trust

    def _look(self) -> list[Imagined]:
        """Take the actions since the last look in the real environments; return the results."""
        taken, self._taken = self._taken, []
        for actions in taken:
            results = [self._play(row, action) for row, action in enumerate(actions)]
            self._worlds.observe(actions, [one.observation for one in results])
        return results

    def _play(self, row: int, action: str) -> Imagined:
        if row in self._over:
            return self._over[row]
        observation, reward, terminated, truncated, _ = self._reals[row].step(action)
        over = terminated or truncated
        result = Imagined(observation, float(reward), 0.0 if over else 1.0)
        if over:
            self._over[row] = result
        return result


ADMISSIBLE = ("admissible", "admissible_commands", "valid")
"""Keys of a real environment's infos with the admissible actions."""


class RealEnv(Starts):
    """A real environment whose episodes are also the imagined ones.

    Its infos contain the goal and, if known, the task, its family, and admissible actions.
    """

    def __init__(self, real: str | gymnasium.Env[str, str]) -> None:
        """Wrap an environment, or make it from its Gymnasium id."""
        self._env = gymnasium.make(real, disable_env_checker=True) if isinstance(real, str) else real
        self._info: Mapping[str, Any] = {}

    def draw(self, random: np.random.Generator, options: Mapping[str, Any]) -> Start:
        """Reset to an episode and return its start. Raises ValueError if the infos have no goal."""
        observation, self._info = self._env.reset(seed=int(random.integers(2**31)), options=dict(options))
        info = self._info
        if "goal" not in info:
            raise ValueError("real: must have the goal in the infos of its reset")
        return Start(Context(info["goal"], observation), info.get("task"), info.get("family"))

    def step(self, action: str) -> tuple[str, Any, bool, bool, Mapping[str, Any]]:
        answer = self._env.step(action)
        self._info = answer[4]
        return answer

    @property
    def admissible(self) -> tuple[str, ...] | None:
        """Return the admissible actions, None if the infos lack them."""
        return next((tuple(self._info[name]) for name in ADMISSIBLE if name in self._info), None)

    def close(self) -> None:
        self._env.close()


class AnchoredTextEnv(ImaginedTextEnv):
    """An imagined environment that steps a real one every few steps, and when it imagines the end.

    Observation, reward and end of such a step are real and replace the imagined steps before. `info["real"]` marks such
    steps; `info["admissible"]` has the admissible actions then, None at imagined steps.
    """

    def __init__(
        self,
        worlds: Worlds,
        real: str | gymnasium.Env[str, str],
        every: int = 5,
        max_steps: int = 50,
        render_mode: str | None = None,
        least_trust: float = 0.0,
    ) -> None:
        """Anchor worlds to a real environment.

        Args:
            worlds: to anchor.
            real: the environment, or its Gymnasium id.
            every: steps between real results; with 1 every result is real.
            max_steps: of an episode.
            render_mode: of Gymnasium.
            least_trust: trust below which a step is looked at, too.
        """
        self._real = RealEnv(real)
        self._anchored = AnchoredWorlds(worlds, [self._real], every, least_trust)
        super().__init__(self._anchored, self._real, max_steps, render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset both. options: the real environment's."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, **self._told()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        predicted = info["predicted"] and not self._anchored.real
        return observation, reward, terminated, truncated, {**info, "predicted": predicted, **self._told()}

    def close(self) -> None:
        super().close()
        self._real.close()

    def _told(self) -> dict[str, Any]:
        real = self._anchored.real
        return {"real": real, "admissible": self._real.admissible if real else None}
