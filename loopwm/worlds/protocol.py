"""Protocol of a world for agents: begin from contexts, step by actions, fork to try alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from loopwm.records.refusals import is_accepted
from loopwm.records.template import Context, FormatError, Transition

Finish = Literal["stop", "length", "full"]
"""End of an observation: complete (stop), cut at the longest decoded length (length), or no room for the step (full).
"""


class WorldError(RuntimeError):
    """The service returned an error or no answer. code: the service's own, such as context_length_exceeded."""

    def __init__(
        self, message: str, code: str | None = None, retry_after: float | None = None, away: bool = False
    ) -> None:
        """Build the error. retry_after: seconds after which to retry. away: the service could not be reached."""
        super().__init__(message)
        self.code, self.retry_after, self.away = code, retry_after, away


@dataclass(frozen=True)
class Imagined:
    """Result of an imagined step.

    observation: empty if not requested. reward (the most likely one, in points) and continuation (probability) are None
    if the model predicts neither, like acceptance, the probability that the action is carried out, and expected_reward,
    the mean. trust: the model's probability of exactly this observation; None if none was decoded to its end.
    """

    observation: str
    reward: float | None = None
    continuation: float | None = None
    finish: Finish = "stop"
    trust: float | None = None
    acceptance: float | None = None
    expected_reward: float | None = None

    @property
    def accepted(self) -> bool:
        """Return True if the action is imagined to be carried out, not refused."""
        return is_accepted(self.observation, self.acceptance)

    @property
    def ends(self) -> bool:
        """Return True if the probability of continuation is below one half; False if none is predicted."""
        return self.continuation is not None and self.continuation < 0.5


def check_lengths(rows: int, kind: type = str, **lists: Sequence[object]) -> None:
    """Raise FormatError for a list without one entry of this kind a row."""
    for name, entries in lists.items():
        if isinstance(entries, str) or not all(isinstance(entry, kind) for entry in entries):
            raise FormatError(name, f"must be a list of {kind.__name__}, one a world, got {entries!r}")
        if len(entries) != rows:
            raise FormatError(name, f"must be {rows}, one a world, got {len(entries)}")


def check_rows(rows: Sequence[int], count: int) -> None:
    """Raise FormatError for a row outside 0 .. count - 1."""
    for row in rows:
        if not 0 <= row < count:
            raise FormatError("rows", f"must be 0 to {count - 1}, got {row}")


class Worlds(Protocol):
    """Batch of worlds that step together, one row each. Lists have one entry a row.

    Raises FormatError, or the service's WorldError, for input that cannot be encoded, lists of another length, and
    unknown rows.
    """

    @property
    def steps_cut(self) -> tuple[int, ...]:
        """Number of old steps dropped from each row's context to fit the limit."""

    def begin(self, contexts: Sequence[Context]) -> None:
        """Start new worlds; earlier ones are dropped."""

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        """Step each world by its action. Without `decode` no text is decoded.

        A row that is "full" stays so: nothing can follow it.
        """

    def fork(self, rows: Sequence[int]) -> Worlds:
        """Copy these rows, repeats allowed, to an independent batch."""

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        """Append real steps after the last real observation; imagined steps since then are dropped."""

    def close(self) -> None: ...


class RowWorlds(Worlds, Protocol):
    """Worlds whose rows also step and restart apart."""

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        """Replace these rows by new worlds; the others continue."""

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        """Step the given rows, None for all."""

    def fork(self, rows: Sequence[int]) -> RowWorlds: ...


def longer(context: Context, action: str, observation: str) -> Context:
    """Return the context after one more step."""
    return replace(context, history=(*context.history, Transition(action, observation)))
