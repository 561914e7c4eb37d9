"""The world that an agent holds: begun from what was seen, stepped by actions, forked to try several things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from loopwm.records.template import Context, FormatError, Transition

Finish = Literal["stop", "length", "full"]
"""How an observation ended: whole; cut at the longest that is decoded; or the world had no room for the step."""


@dataclass(frozen=True)
class Imagined:
    """What a step is imagined to bring.

    observation: empty where none was asked for. reward (points) and continuation, the chance that the world goes on,
    are None where the model predicts neither.
    """

    observation: str
    reward: float | None = None
    continuation: float | None = None
    finish: Finish = "stop"

    @property
    def ends(self) -> bool:
        """Whether the world is over: its chance to go on is below one half. Never, where none is predicted."""
        return self.continuation is not None and self.continuation < 0.5


def check_lengths(rows: int, **lists: Sequence[str]) -> None:
    """Raises FormatError for a list that has not one entry a row."""
    for name, entries in lists.items():
        if len(entries) != rows:
            raise FormatError(name, f"{len(entries)} given for {rows} worlds")


def check_rows(rows: Sequence[int], count: int) -> None:
    """Raises FormatError for a row that is none of `count`."""
    for row in rows:
        if not 0 <= row < count:
            raise FormatError("rows", f"{row} is not one of 0 to {count - 1}")


class Worlds(Protocol):
    """A batch of worlds that go on together, one row each. Lists that are passed have one entry a row.

    What cannot be encoded is a FormatError, or the service's WorldError; so are a list of another length, and a row
    that there is not.
    """

    @property
    def steps_cut(self) -> tuple[int, ...]:
        """How many old steps each row's context has lost to fit the limit."""
        ...

    def begin(self, contexts: Sequence[Context]) -> None:
        """New worlds; those before are forgotten."""

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        """Each world after its action; the next step goes on from there. Without `decode` no text is made.

        A row that is "full" stays so: nothing can follow it.
        """

    def fork(self, rows: Sequence[int]) -> Worlds:
        """Independent copies of these rows, repeats allowed: a batch of their own."""

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        """What really happened after the last real observation; imagined steps since then are dropped."""

    def close(self) -> None: ...


def longer(context: Context, action: str, observation: str) -> Context:
    """The context after one more step."""
    return replace(context, history=(*context.history, Transition(action, observation)))
