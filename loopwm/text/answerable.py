"""Tokens of a row that are undetermined: no text in the row determines them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from loopwm.records.template import ContextKind
from loopwm.records.token_episode import ACTION, INVENTORY, LOOK, OBSERVATION, TokenEpisode

COMPLETE: tuple[ContextKind, ...] = ("briefed", "full")
"""Contexts with a hidden state, which includes facts that the agent has not seen."""

SHOWN_AT_HEAD: dict[ContextKind, tuple[int, ...]] = {
    "observed": (OBSERVATION,),
    "snapshot": (LOOK, INVENTORY, OBSERVATION),
}
"""Kinds of the head's texts that show facts, if the context is not complete."""


class RowFacts:
    """Facts that a row shows, each with the first step that shows it.

    A deferred observation is not shown, but the actions up to it are, and an action may name the object that it moves.
    """

    def __init__(self, episode: TokenEpisode, head: int, context_kind: ContextKind, steps: Iterable[int]) -> None:
        """Collect the facts.

        steps: all steps after the head that the row shows or whose actions it defers, ascending.
        """
        self._episode = episode
        self._complete = context_kind in COMPLETE or not len(episode.facts)  # no facts: all is determined
        self._shown: dict[int, int] = {}
        self._named: dict[int, int] = {}
        if self._complete:
            return
        for kind in SHOWN_AT_HEAD[context_kind]:
            self._add(self._shown, kind, head, head)
        for step in steps:
            self._add(self._named, ACTION, step, step)
            self._add(self._shown, OBSERVATION, step, step)

    def _add(self, known: dict[int, int], kind: int, step: int, since: int) -> None:
        for fact in self._episode.facts_of(kind, step).shown:
            known.setdefault(fact, since)  # the first step that shows a fact counts

    def undetermined(self, kind: int, step: int, index: int = 0, *, last_shown: int) -> list[bool]:
        """Return for each token of a text True if it is undetermined.

        last_shown: last step whose observation the reader sees. The action of the text's step is known.
        """
        text = self._episode.text(kind, step, index)
        marks = [False] * (0 if text is None else len(text))
        if self._complete:
            return marks
        for (start, length), facts in self._episode.facts_of(kind, step, index).needs:
            if not any(self._known(fact, step, last_shown) for fact in facts):
                marks[start : start + length] = [True] * length
        return marks

    def _known(self, fact: int, step: int, last_shown: int) -> bool:
        return self._shown.get(fact, math.inf) <= last_shown or self._named.get(fact, math.inf) <= step
