"""Baseline `retrieve-names`: `retrieve` among matching places, with names replaced by those of the question.

A place matches if its action has the same verb and, if the action was taken before and its answer has numbers, if it
agrees with these readings. Two or more readings that no place agrees with are continued instead. The actions and
observations of the most similar match are aligned with those of the question, and names that differ are replaced in its
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice

import numpy as np

from eval.models.alignment import Scene, rename, renaming
from eval.models.readings import ReadingIndex, continue_in_view
from eval.models.retrieve import Retrieval
from eval.scores.metrics import names_of
from loopwm.text.memory import Index, Place, Question, TrainEpisode, verb

EARLIER_STEPS = 8
"""Earlier steps that are aligned as well."""


class RetrieveNames(Retrieval):
    def __init__(self, episodes: Sequence[TrainEpisode]) -> None:
        super().__init__(episodes)
        self._readings = cache(ReadingIndex)

    def _answer(self, question: Question, index: Index) -> str:
        in_view = self._readings(index).look_up(question)
        # The readings determine how the observation changes, and no place agrees with that.
        if len(in_view.readings) > 1 and in_view.agreed < 2:
            return continue_in_view(question, in_view.readings)
        fitting = np.asarray(in_view.agreeing) if in_view.agreed else index.of_verb(question.actions[-1])
        numbers = fitting if fitting.size else np.arange(len(index.places))
        return retell(index.most_similar(question, numbers), question)


def retell(place: Place, question: Question) -> str:
    """Return the place's answer with its names replaced by their counterparts in the question."""
    names = names_of(place.episode.env)
    if names is None:
        return place.answer
    there = Scene([observation for _, observation in reversed(place.episode.steps[: place.step + 1])], names)
    here = Scene([observation for _, observation in reversed(question.history)], names)
    return rename(place.answer, renaming(*_pairs(place, question), there, here, names), names)


def _pairs(place: Place, question: Question) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return actions and observations (there, here) of steps with equal verbs, the last first."""
    deferred = zip(reversed(place.actions), reversed(question.actions), strict=True)
    steps = zip(reversed(place.history[1:]), reversed(question.history[1:]), strict=False)
    alike = [pair for pair in islice(steps, EARLIER_STEPS) if verb(pair[0][0]) == verb(pair[1][0])]
    actions = [pair for pair in deferred if verb(pair[0]) == verb(pair[1])]
    return [*actions, *((old[0], new[0]) for old, new in alike)], [(old[1], new[1]) for old, new in alike]
