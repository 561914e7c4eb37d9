"""Worlds that real environments put right: every few steps what happened takes the place of what was imagined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, Worlds


class Real(Protocol):
    """A real environment, as Gymnasium has them."""

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, Mapping[str, Any]]: ...


class AnchoredWorlds:
    """Rows that all look at their real environments after `every` steps, and where one of them is imagined to end or is
    full: the real ones take the actions since the last look, and each world is told what they brought.

    Steps in between cost the real environments nothing. `real` tells whether the last step was a look: its answers are
    the real ones, and a continuation of 0 is the end, which stands from then on.
    """

    def __init__(self, worlds: Worlds, reals: Sequence[Real], every: int) -> None:
        """reals: one a row, which stand where the row begins. Raises ValueError."""
        if every < 1:
            raise ValueError(f"every: {every} is not above zero")
        self.real = True
        self._worlds, self._reals, self._every = worlds, reals, every
        self._taken: list[Sequence[str]] = []
        self._over: dict[int, Imagined] = {}

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return self._worlds.steps_cut

    def begin(self, contexts: Sequence[Context]) -> None:
        """Raises ValueError for more or fewer contexts than real environments."""
        if len(contexts) != len(self._reals):
            raise ValueError(f"begin: {len(contexts)} contexts for {len(self._reals)} real environments")
        self._worlds.begin(contexts)
        self._taken, self._over, self.real = [], {}, True

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        imagined = self._worlds.step(actions, decode)
        self._taken.append(actions)
        ends = any(_ends(one) for row, one in enumerate(imagined) if row not in self._over)
        self.real = len(self._taken) == self._every or ends
        told = self._look() if self.real else imagined
        return [self._over.get(row, one) for row, one in enumerate(told)]

    def fork(self, rows: Sequence[int]) -> Worlds:
        """Imagined alone: there is one real environment a row."""
        return self._worlds.fork(rows)

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        """What the real environments did in somebody else's hands."""
        self._worlds.observe(actions, observations)
        self._taken = []

    def close(self) -> None:
        self._worlds.close()

    def _look(self) -> list[Imagined]:
        """What the actions since the last look really brought."""
        taken, self._taken = self._taken, []
        for actions in taken:
            told = [self._play(row, action) for row, action in enumerate(actions)]
            self._worlds.observe(actions, [one.observation for one in told])
        return told

    def _play(self, row: int, action: str) -> Imagined:
        if row in self._over:
            return self._over[row]
        observation, reward, terminated, truncated, _ = self._reals[row].step(action)
        over = terminated or truncated
        told = Imagined(observation, float(reward), 0.0 if over else 1.0)
        if over:
            self._over[row] = told
        return told


def _ends(imagined: Imagined) -> bool:
    return imagined.finish == "full" or (imagined.continuation is not None and imagined.continuation < 0.5)
