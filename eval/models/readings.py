"""Readings: earlier observations of the same action. Their numbers, if any, change with time.

A place of a train episode agrees with a question if the same numbers were read the same time before. Time is
ScienceWorld's: an invalid action, and a look at the room, the inventory or the task, take none; everything else takes
a tick, and waiting as many as it names besides. The duration of a deferred action is its most frequent one in the train
episodes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

import numpy as np

from loopwm.text.memory import Index, Question, Steps, TrainEpisode, verb

AT_MOST = 12
"""Most readings of a place that are compared."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WAITED = re.compile(r"You decide to wait for (\d+) iterations\.")
_REFUSED = "No known action matches that input."
_FREE = ("look around", "inventory", "task")


@dataclass(frozen=True)
class Reading:
    """Numbers of an observation (possibly none), and its ticks before the observation to predict."""

    back: int
    numbers: tuple[str, ...]


def ticks(action: str, observation: str) -> int:
    """Return the duration of a step."""
    if observation == _REFUSED or action in _FREE:
        return 0
    waited = _WAITED.match(observation)
    return 1 + int(waited[1]) if waited else 1


def readings(steps: Steps, times: Sequence[int], last: int, action: str, target: int) -> Iterator[Reading]:
    """Yield observations of `action` up to step `last`, the last first, while the texts differ only in numbers.

    times: ticks by step. target: time of the observation to predict.
    """
    template = None
    for step in range(last, 0, -1):
        if steps[step][0] != action:
            continue
        numbers, without = _numbers(steps[step][1])
        template = without if template is None else template
        if without != template:
            return
        yield Reading(target - times[step], numbers)


@cache
def _numbers(text: str) -> tuple[tuple[str, ...], str]:
    return tuple(_NUMBER.findall(text)), _NUMBER.sub("#", text)


@dataclass(frozen=True)
class InView:
    """Readings in a question, the last first, and the number of them that each place agrees with."""

    readings: Sequence[Reading]
    agreeing: Sequence[int]
    agreed: int


class ReadingIndex:
    """Places of an index by the readings before them."""

    def __init__(self, index: Index) -> None:
        self._usual = usual_ticks(index.episodes)
        self._before: list[frozenset[Reading]] = []
        self._by_reading: dict[tuple[str, Reading], list[int]] = defaultdict(list)
        times = {id(episode): list(accumulate(ticks(*step) for step in episode.steps)) for episode in index.episodes}
        for number, place in enumerate(index.places):
            clock = times[id(place.episode)]
            place_readings = readings(place.episode.steps, clock, place.step - 1, place.action, clock[place.step])
            self._before.append(frozenset(reading for reading in islice(place_readings, AT_MOST) if reading.numbers))
            for reading in self._before[-1]:
                self._by_reading[verb(place.action), reading].append(number)

    def look_up(self, question: Question) -> InView:
        """Return the places that agree with most of the readings in view, counted from the last."""
        times = list(accumulate(ticks(*step) for step in question.history))
        target = times[-1] + sum(self._usual.get(action, 1) for action in question.actions)
        action = question.actions[-1]
        in_view = list(islice(readings(question.history, times, len(times) - 1, action, target), AT_MOST))
        matches: Sequence[int] = ()
        for agreed, reading in enumerate(in_view):
            of_verb = self._by_reading.get((verb(action), reading), [])
            further = [number for number in matches if reading in self._before[number]] if agreed else of_verb
            if not further:
                return InView(in_view, matches, agreed)
            matches = further
        return InView(in_view, matches, len(in_view))


def usual_ticks(episodes: Sequence[TrainEpisode]) -> Mapping[str, int]:
    """Return the most frequent duration of each action; the shortest of equally frequent ones."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for episode in episodes:
        for action, observation in episode.steps[1:]:
            counts[action][ticks(action, observation)] += 1
    return {action: min(tally, key=lambda n: (-tally[n], n)) for action, tally in counts.items()}


def continue_in_view(question: Question, in_view: Sequence[Reading]) -> str:
    """Continue the readings to the observation to predict; repeat the last if no time passed since."""
    *_, last = (text for action, text in question.history if action == question.actions[-1])
    if in_view[0].back == in_view[-1].back or len({reading.numbers for reading in in_view}) == 1:
        return last
    texts = [_with_numbers(last, reading.numbers) for reading in reversed(in_view)]
    return _continue_readings([-reading.back for reading in reversed(in_view)], texts, 0)


def _with_numbers(text: str, numbers: Sequence[str]) -> str:
    values = iter(numbers)
    return _NUMBER.sub(lambda _: next(values), text)


def _continue_readings(steps: Sequence[int], texts: Sequence[str], target: int) -> str:
    """Return the last text with its numbers continued to step `target`. The texts are equal but for their numbers."""
    printed = _NUMBER.findall(texts[-1])
    if not printed:
        return texts[-1]
    values = np.array([_NUMBER.findall(text) for text in texts], dtype=np.float64)
    offsets = np.array(steps, dtype=np.float64) - np.mean(steps)
    slopes = offsets @ values / (offsets @ offsets)  # least squares; the times differ
    continued = values.mean(axis=0) + slopes * (target - np.mean(steps))
    return _with_numbers(texts[-1], [_print_like(*pair) for pair in zip(continued, printed, strict=True)])


def _print_like(value: float, like: str) -> str:
    """Round (halves up) to the number of decimals that `like` has."""
    decimals = len(like.partition(".")[2])
    scale = 10**decimals
    return f"{math.floor(value * scale + 0.5) / scale:.{decimals}f}"  # `round` takes halves to even
