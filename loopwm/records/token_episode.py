"""Tokenised episodes: light views of flat arrays, whose texts are sliced on access.

A text is a span: tokens[start : start + length] of the step `step`, of the kind GOAL, HIDDEN, ... Texts that repeat
within an episode share their tokens, so that texts are equal if their starts and lengths are.

A fact is a number whose meaning is the environment's, such as "contents of drawer 2". A row of facts with length 0
means that the text that starts there shows the fact; with another length, that tokens[start : start + length] are
determined for a reader who has it. Tokens with several facts are determined by each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopwm.records.template import ContextKind

GOAL, HIDDEN, LOOK, INVENTORY, OBSERVATION, ACTION, QUERY, ANSWER = range(8)
SPAN_DTYPE = np.dtype([("start", "<i8"), ("length", "<i4"), ("step", "<i4"), ("kind", "u1")])
STEP_DTYPE = np.dtype([("reward", "<f4"), ("done", "?"), ("accepted", "?")])
FACT_DTYPE = np.dtype([("start", "<i8"), ("length", "<i4"), ("fact", "<i4")])
Tokens = NDArray[np.integer]
NO_TOKENS: Tokens = np.empty(0, dtype=np.uint16)
NO_FACTS = np.empty(0, dtype=FACT_DTYPE)


class PlacedFacts(NamedTuple):
    """Facts that a text shows, and start and length of its parts, each with the facts that determine it."""

    shown: Sequence[int] = ()
    needs: Sequence[tuple[tuple[int, int], Sequence[int]]] = ()


class Texts(Sequence[Any]):
    """Texts of one kind of an episode, by step; empty if a step has none."""

    def __init__(self, episode: TokenEpisode, kind: int) -> None:
        self._episode, self._kind = episode, kind

    def __len__(self) -> int:
        return len(self._episode.steps)

    def __getitem__(self, index: Any) -> Any:
        steps = range(len(self))[index]
        if isinstance(steps, range):
            return [self[step] for step in steps]
        text = self._episode.text(self._kind, steps)
        return NO_TOKENS if text is None else text


@dataclass(frozen=True, eq=False)
class TokenEpisode:
    """A tokenised episode of n steps; step 0 is the reset, whose action is empty.

    Attributes:
        tokens: of the texts, and where the arrays are a shard's also of those of other episodes.
        spans: SPAN_DTYPE, ordered by step and kind.
        steps: STEP_DTYPE (n,); a reward is a score difference in points, NaN where it was not recorded; an action is
            accepted unless its observation refuses it.
        facts: FACT_DTYPE, ordered by start and length.
        weight: how often an epoch of training takes the episode.
    """

    tokens: Tokens
    spans: NDArray[np.void]
    steps: NDArray[np.void]
    facts: NDArray[np.void] = field(default_factory=lambda: NO_FACTS)
    env: str = ""
    task: str = ""
    policy: str = ""
    weight: float = 1.0

    @property
    def goal(self) -> Tokens:
        goal = self.text(GOAL, 0)
        assert goal is not None
        return goal

    @property
    def observations(self) -> Sequence[Tokens]:
        return Texts(self, OBSERVATION)

    @property
    def actions(self) -> Sequence[Tokens]:
        return Texts(self, ACTION)

    @property
    def rewards(self) -> NDArray[np.float32]:
        return self.steps["reward"]

    @property
    def dones(self) -> NDArray[np.bool_]:
        return self.steps["done"]

    @property
    def accepted(self) -> NDArray[np.bool_]:
        return self.steps["accepted"]

    @property
    def last_step(self) -> int:
        return len(self.steps) - 1

    def head(self, step: int, context_kind: ContextKind) -> dict[str, Tokens | None]:
        """Return the texts that open a context at `step` before its observation, by the name of their mark."""
        texts: dict[str, Tokens | None] = {"goal": self.goal}
        if context_kind in ("briefed", "full"):
            texts["hidden"] = self.text(HIDDEN, step)
        if context_kind in ("snapshot", "full"):
            texts |= {"look": self.text(LOOK, step), "inv": self.text(INVENTORY, step)}
        return texts

    def text(self, kind: int, step: int, index: int = 0) -> Tokens | None:
        """Return the tokens of the text `index` of a kind after a step; None if there is none."""
        place = self._place(kind, step, index)
        return None if place is None else self.tokens[place[0] : place[1]]

    def queries_at(self, step: int) -> list[tuple[Tokens, Tokens]]:
        """Return the state queries after a step, actions that only look, with their answers."""
        return [tuple(self.tokens[a:b] for a, b in pair) for pair in self.query_places(step)]  # type: ignore[misc]

    def query_places(self, step: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return start and end of the tokens of the state queries after a step, and of their answers.

        Equal texts are at equal places, so that comparing them reads no token.
        """
        return list(zip(self._places(QUERY, step), self._places(ANSWER, step), strict=True))

    def answers(self, steps: range) -> list[dict[tuple[int, int], tuple[int, int]]]:
        """Map for each of consecutive steps the place of a state query to that of its answer: see `query_places`."""
        places: dict[int, list[list[tuple[int, int]]]] = {kind: [[] for _ in steps] for kind in (QUERY, ANSWER)}
        spans = self.spans[self._step_starts[steps.start] : self._step_starts[steps.stop]]
        for start, length, step, kind in spans[np.isin(spans["kind"], list(places))].tolist():
            places[kind][step - steps.start].append((start, start + length))
        return [dict(zip(*pair, strict=True)) for pair in zip(places[QUERY], places[ANSWER], strict=True)]

    def facts_of(self, kind: int, step: int, index: int = 0) -> PlacedFacts:
        """Return the facts of a text, with starts that count from its first token."""
        place = self._place(kind, step, index)
        return PlacedFacts() if place is None else _facts_at(self, place)

    def lengths(self, kind: int) -> NDArray[np.int32]:
        """Return the number of tokens of each step's text of the kind, 0 if there is none: (n,)."""
        lengths = np.zeros(len(self.steps), dtype=np.int32)
        spans = self.spans[self.spans["kind"] == kind]
        lengths[spans["step"]] = spans["length"]
        return lengths

    def identities(self, kind: int) -> NDArray[np.int64]:
        """Return numbers that are equal if the texts of the kind are; -1 for empty texts: (n,)."""
        identities = np.full(len(self.steps), -1, dtype=np.int64)
        spans = self.spans[(self.spans["kind"] == kind) & (self.spans["length"] > 0)]
        identities[spans["step"]] = spans["start"]
        return identities

    # Fields of structured arrays are strided views, which a search would copy every time.

    @cached_property
    def _step_starts(self) -> list[int]:
        """First span of each step; a step behind the last has none."""
        starts: list[int] = np.searchsorted(self.spans["step"], np.arange(len(self.steps) + 2)).tolist()
        return starts

    @cached_property
    def _fact_starts(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self.facts["start"])

    def _places(self, kind: int, step: int) -> list[tuple[int, int]]:
        """Return start and end in `tokens` of the texts of a kind after a step."""
        return _places_at(self, step).get(kind, [])

    def _place(self, kind: int, step: int, index: int) -> tuple[int, int] | None:
        places = self._places(kind, step)
        return places[index] if index < len(places) else None


# A row looks up the texts of its steps hundreds of times. Kept for few rows: training has millions of steps.
@lru_cache(maxsize=1024)
def _places_at(episode: TokenEpisode, step: int) -> dict[int, list[tuple[int, int]]]:
    """Return start and end in `tokens` of the texts after a step, by kind."""
    places: dict[int, list[tuple[int, int]]] = {}
    spans = episode.spans[episode._step_starts[step] : episode._step_starts[step + 1]]
    for start, length, _, kind in spans.tolist():
        places.setdefault(kind, []).append((start, start + length))
    return places


@lru_cache(maxsize=1024)
def _facts_at(episode: TokenEpisode, place: tuple[int, int]) -> PlacedFacts:
    """Return the facts that start in a text, counting from its first token."""
    first, last = np.searchsorted(episode._fact_starts, place)
    shown: list[int] = []
    needs: dict[tuple[int, int], list[int]] = {}
    for start, length, fact in episode.facts[first:last].tolist():
        (needs.setdefault((start - place[0], length), []) if length else shown).append(fact)
    return PlacedFacts(tuple(shown), tuple(needs.items()))
