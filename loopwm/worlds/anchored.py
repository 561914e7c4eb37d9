"""Imagined worlds that are resynchronised with real environments every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, Worlds


class Real(Protocol):
    """A real environment with Gymnasium's interface."""

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, Mapping[str, Any]]: ...


class AnchoredWorlds:
    """Rows that step their real environments every `every` steps, and when one is imagined to end or is full.

    The real environments then take the actions since the last such step, and each world observes the results. `real` is
    True if the last step was one: its results are real, and a continuation of 0 is the end, which stays.
    """

    def __init__(self, worlds: Worlds, reals: Sequence[Real], every: int) -> None:
        """Pair worlds with real environments, one a row, at the state where the row begins. Raises ValueError."""
        if every < 1:
            raise ValueError(f"every: must be above 0, got {every}")
        self.real = True
        self._worlds, self._reals, self._every = worlds, reals, every
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
        ends = any(_ends(one) for row, one in enumerate(imagined) if row not in self._over)
        self.real = len(self._taken) == self._every or ends
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


def _ends(imagined: Imagined) -> bool:
    return imagined.finish == "full" or (imagined.continuation is not None and imagined.continuation < 0.5)
