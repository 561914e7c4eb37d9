"""The `retrieve-names` baseline: `retrieve` whose answer is put in the names of the place that is asked about.

Readings come first: where the asked action was taken before and told numbers, of all places those are taken whose
readings agree with those in view at the same steps; of these the most similar. Where two or more readings are in view
and no place agrees with them, they are continued. Then the actions there and here are aligned, and the names that differ
are substituted in what was seen there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eval.alignment import World, rename, renaming
from eval.baselines import continue_readings
from eval.entities import names_of
from eval.episodes import Episode
from eval.markov import verb
from eval.retrieve import Index, Place, Question, Retrieval, Steps, read_episodes_for
from eval.windows import Window

EARLIER_STEPS = 8
"""Steps up to now that are aligned as well."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Reading:
    """Numbers that the asked action told, and how many steps before the one asked about."""

    back: int
    numbers: tuple[str, ...]


class RetrieveNames(Retrieval):
    def __init__(self, episodes: Sequence[Episode]) -> None:
        super().__init__(episodes)
        self._readings = cache(ReadingIndex)
        self._by_verb = cache(_by_verb)

    def _answer(self, question: Question, index: Index) -> str:
        in_view = list(readings(question.seen, question.now, question.step, question.actions[-1]))
        agreeing, agreed = self._readings(index).agreeing(question.actions[-1], in_view)
        if len(in_view) > 1 and agreed < 2:
            return _continue(question, in_view)
        of_verb = self._by_verb(index).get(verb(question.actions[-1]), range(len(index.places)))
        candidates = np.asarray(agreeing if agreed else of_verb)
        best = candidates[index.scores(question)[candidates].argmax()]
        return retell(index.places[best], question)


def _by_verb(index: Index) -> Mapping[str, NDArray[np.int64]]:
    places: dict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(index.places):
        places[verb(place.action)].append(number)
    return {verb: np.array(numbers) for verb, numbers in places.items()}


class ReadingIndex:
    """The places of an index by the last reading in view there."""

    def __init__(self, index: Index) -> None:
        self._places = index.places
        self._by_last: dict[tuple[str, Reading], list[int]] = defaultdict(list)
        for number in range(len(index.places)):
            for last in islice(self._readings(number), 1):
                self._by_last[verb(index.places[number].action), last].append(number)

    def agreeing(self, action: str, in_view: Sequence[Reading]) -> tuple[list[int], int]:
        """The places that agree with most of the readings, counted from the last, and with how many."""
        found = self._by_last.get((verb(action), in_view[0]), []) if in_view else []
        theirs = {number: list(islice(self._readings(number), len(in_view))) for number in found}
        for agreed in range(1, len(in_view)):
            further = [number for number in found if theirs[number][agreed : agreed + 1] == [in_view[agreed]]]
            if not further:
                return found, min(agreed, len(found))
            found = further
        return found, len(in_view) if found else 0

    def _readings(self, number: int) -> Iterator[Reading]:
        place = self._places[number]
        return readings(place.episode.steps, place.now, place.step, place.action)


def readings(steps: Steps, now: int, target: int, action: str) -> Iterator[Reading]:
    """What `action` told up to now, the last first, as long as the texts are the same but for their numbers.

    now, target: step up to which was seen, and the one asked about.
    """
    template = None
    for step in range(now, 0, -1):
        if steps[step][0] != action:
            continue
        numbers, without = _numbers(steps[step][1])
        template = without if template is None else template
        if not numbers or without != template:
            return
        yield Reading(target - step, numbers)


@cache
def _numbers(text: str) -> tuple[tuple[str, ...], str]:
    return tuple(_NUMBER.findall(text)), _NUMBER.sub("#", text)


def _continue(question: Question, in_view: Sequence[Reading]) -> str:
    steps = [question.step - reading.back for reading in reversed(in_view)]
    return continue_readings(steps, [question.seen[step][1] for step in steps], question.step)


def retell(place: Place, question: Question) -> str:
    """The place's answer with the names of the things that stand where the place's things do."""
    names = names_of(place.episode.env)
    if names is None:
        return place.answer
    there = World([observation for _, observation in reversed(place.episode.steps[: place.step + 1])], names)
    here = World([observation for _, observation in reversed(question.seen)], names)
    return rename(place.answer, renaming(*_pairs(place, question), there, here, names))


def _pairs(place: Place, question: Question) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Actions and observations (there, here) of the same step where the verb is the same, the last first."""
    deferred = zip(reversed(place.actions), reversed(question.actions), strict=True)
    steps = zip(reversed(place.seen[1:]), reversed(question.seen[1:]), strict=False)
    alike = [pair for pair in islice(steps, EARLIER_STEPS) if verb(pair[0][0]) == verb(pair[1][0])]
    actions = [pair for pair in deferred if verb(pair[0]) == verb(pair[1])]
    return [*actions, *((old[0], new[0]) for old, new in alike)], [(old[1], new[1]) for old, new in alike]


def load_retrieve_names(windows: Sequence[Window], train_episodes: Sequence[Path]) -> RetrieveNames:
    """Raises EvalError where the episodes lack an environment of the windows."""
    return RetrieveNames(read_episodes_for(windows, train_episodes))
