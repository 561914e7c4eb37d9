"""Memory: recorded episodes, and what followed their steps that are most similar to a question, by BM25.

A document is one step of an episode, described by its action, the k - 1 actions before it, and the texts before those:
the last observation, the two before it, and the goal. A prefix of each word names its field, and actions count also as
whole strings. BM25 is without length normalisation (b = 0), so that a question without history matches the same
documents. It needs no torch.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import bm25s
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from loopwm.records.episodes import TRAIN_SPLITS, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, sha256
from loopwm.records.names import names_pattern
from loopwm.records.template import Context
from loopwm.records.training_episodes import episode_hash

ACTION_WEIGHT = 10
"""Repeats of the whole string of the action to predict."""

OBSERVATION_WEIGHT = 2
EARLIER_OBSERVATIONS = 2

MOST_ACTIONS = 8
"""Actions since the last observation beyond which nothing is recalled: every number has an index of its own."""

LEADS_BACK = 3
"""Least times that an action is recorded to lead back from where another led."""

_WORD = re.compile(r"[a-z0-9]+")
Steps = Sequence[tuple[str, str]]
"""(action, observation) pairs up to now; the first action is empty."""


@dataclass(frozen=True)
class TrainEpisode:
    """Train episode.

    steps: (action, observation) pairs, stripped; the first action is empty. hash: its name in checkpoints.
    """

    env: str
    policy: str
    goal: str
    steps: tuple[tuple[str, str], ...]
    hash: int = field(repr=False)

    @property
    def hashed(self) -> bytes:
        """Return its contribution to the SHA-256 of episodes, independent of files."""
        return f"{self!r}\n".encode()


def read_train_episodes(paths: Iterable[Path]) -> Iterator[TrainEpisode]:
    """Yield the episodes of files and folders. Raises InputError for one outside the train split."""
    for path in line_files(paths):
        episodes = tqdm(read_episodes(path), desc=path.name, unit="episode", leave=False)
        for line, episode in enumerate(episodes, start=1):
            if episode.split not in TRAIN_SPLITS:
                raise InputError(f"{path}: line {line}: split: must be train, got {episode.split!r}")
            steps = [((step.action or "").strip(), step.observation.strip()) for step in episode.steps]
            if not all(action for action, _ in steps[1:]):
                raise InputError(f"{path}: line {line}: action: must not be empty")
            yield TrainEpisode(episode.env, episode.policy, episode.goal, tuple(steps), int(episode_hash(episode), 16))


def episodes_sha256(episodes: Iterable[TrainEpisode]) -> str:
    return sha256(b"".join(episode.hashed for episode in episodes))


@dataclass(frozen=True)
class Place:
    """Step of a train episode, `horizon` actions after the observations that describe it."""

    episode: TrainEpisode
    step: int
    horizon: int

    @property
    def now(self) -> int:
        """Return the last observed step."""
        return self.step - self.horizon

    @property
    def history(self) -> Steps:
        return self.episode.steps[: self.now + 1]

    @property
    def action(self) -> str:
        return self.episode.steps[self.step][0]

    @property
    def actions(self) -> list[str]:
        return [action for action, _ in self.episode.steps[self.now + 1 : self.step + 1]]

    @property
    def answer(self) -> str:
        return self.episode.steps[self.step][1]


@dataclass(frozen=True)
class Question:
    """Context and actions, whose last observation is to be predicted."""

    goal: str
    history: Steps
    actions: Sequence[str]

    @classmethod
    def of(cls, context: Context, actions: Sequence[str]) -> Question:
        steps = [("", context.observation), *((step.action, step.observation) for step in context.history)]
        return cls(context.goal, steps, actions)


class Index:
    """Places of an environment at one horizon, with their similarity to a question."""

    def __init__(self, episodes: Sequence[TrainEpisode], horizon: int) -> None:
        self.episodes = episodes
        self.places = [Place(e, step, horizon) for e in episodes for step in range(horizon, len(e.steps))]
        self._verbs = np.array([verb(place.action) for place in self.places])
        self._bm25 = bm25s.BM25(k1=1.5, b=0.0)
        if self.places:
            terms = [describe(place.episode.goal, place.history, place.actions) for place in self.places]
            self._bm25.index(terms, show_progress=False)

    def scores(self, question: Question) -> NDArray[np.float32]:
        """Return similarities by place, (places,)."""
        return self._bm25.get_scores(describe(question.goal, question.history, question.actions))

    def of_verb(self, action: str) -> NDArray[np.int64]:
        """Return the numbers of the places whose action has the same verb, in order."""
        return np.flatnonzero(self._verbs == verb(action))

    def most_similar(self, question: Question, numbers: NDArray[np.int64]) -> Place:
        """Return the most similar of some places, of which there is one; of equal ones the first."""
        return self.places[numbers[self.scores(question)[numbers].argmax()]]


class Memory:
    """Recorded episodes to recall from, whatever their environment."""

    def __init__(self, episodes: Sequence[TrainEpisode]) -> None:
        self._episodes = episodes
        self._index = cache(lambda horizon: Index(self._episodes, horizon))
        self._building = Lock()
        self._lasting, self._opposites = _lasting_verbs(episodes), _opposite_actions(episodes)

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Memory:
        """Read files and folders. Raises InputError for what is no episode of the train split, or if there are none."""
        try:
            episodes = list(read_train_episodes(paths))
        except InputError as error:
            raise InputError(f"--memory: {error} (loopwm import makes episodes of logs)") from error
        if not episodes:
            raise InputError("--memory: must hold an episode, got none")
        return cls(episodes)

    @property
    def starts(self) -> list[tuple[str, str]]:
        """Return goals and first observations, of a hundred episodes at most."""
        return [(episode.goal, episode.steps[0][1]) for episode in self._episodes[:100]]

    @cached_property
    def sha256(self) -> str:
        return episodes_sha256(self._episodes)

    def recall(self, context: Context, actions: Sequence[str]) -> str | None:
        """Return a likely observation after the last action, None if there is nothing to recall.

        An action that leads to a place of the context brings what that place showed last. One that was taken in the
        context before brings the same again if it was taken after the same observation, if it brought the same twice
        already, or if recorded actions of its verb mostly do. Everything else brings what it did at the most similar
        recorded step with the same verb.
        """
        if not 0 < len(actions) <= MOST_ACTIONS:
            return None
        question = Question.of(context, actions)
        if (place_shown := _shown_by_place(question, self._opposites)) is not None:
            return place_shown
        earlier = [observation for action, observation in question.history if action == actions[-1]]
        if earlier and (verb(actions[-1]) in self._lasting or earlier[-2:] == earlier[-1:] * 2):
            return earlier[-1]
        if (again := _seen_before(question)) is not None:
            return again
        with self._building:  # two questions at once would both build it
            index: Index = self._index(len(actions))
        numbers = index.of_verb(actions[-1])
        if not numbers.size:
            return None
        place = index.most_similar(question, numbers)
        return retell(place.answer, place.action, actions[-1])


def _lasting_verbs(episodes: Sequence[TrainEpisode]) -> frozenset[str]:
    """Return the verbs whose actions, when repeated in an episode, mostly bring the same as the last time."""
    same, repeated = Counter[str](), Counter[str]()
    for episode in episodes:
        last: dict[str, str] = {}
        for action, observation in episode.steps[1:]:
            repeated[verb(action)] += action in last
            same[verb(action)] += last.get(action) == observation
            last[action] = observation
    return frozenset(name for name, count in repeated.items() if 2 * same[name] > count)


def _opposite_actions(episodes: Sequence[TrainEpisode]) -> dict[str, str]:
    """Map actions to their opposites: each right after the other mostly leads back to where it began."""
    back, pairs = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for episode in episodes:
        steps = episode.steps
        for (_, before), (action, away), (other, after) in zip(steps, steps[1:], steps[2:], strict=False):
            if action != other and _title(before) != _title(away):
                pairs[action, other] += 1
                back[action, other] += _title(before) == _title(after)
    mostly = {pair for pair, count in back.items() if count >= LEADS_BACK and 2 * count > pairs[pair]}
    return {action: other for action, other in sorted(mostly) if (other, action) in mostly}


def _shown_by_place(question: Question, opposites: Mapping[str, str]) -> str | None:
    """Return what the place showed last to which the last action leads, on ways of the context or back on them.

    A place is known by the first line of what it shows.
    """
    (_, text), *steps = question.history
    place: str | None = _title(text)
    shown, ways = {place: text}, dict[tuple[str | None, str], str | None]()
    for action, text in steps:
        if action in opposites and _title(text) != place:
            ways |= {(place, action): _title(text), (_title(text), opposites[action]): place}
            place = _title(text)
        if _title(text) == place:
            shown[place] = text
    for action in question.actions:
        place = ways.get((place, action)) if action in opposites else place
    return shown.get(place) if question.actions[-1] in opposites else None


def _title(text: str) -> str:
    return text.partition("\n")[0]


def _seen_before(question: Question) -> str | None:
    """Return what a single action brought when it was last taken after the same observation."""
    if len(question.actions) > 1:
        return None
    now = (question.history[-1][1], question.actions[0])
    steps = reversed(list(pairwise(question.history)))
    return next((after for (_, before), (action, after) in steps if (before, action) == now), None)


def verb(action: str) -> str:
    return next(iter(action.split()), "")


def retell(answer: str, action: str, other: str) -> str:
    """Return the answer to an action, with words of the action replaced by those in their place in another."""
    old, new = action.split(), other.split()
    spans = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    words = {" ".join(old[i:j]): " ".join(new[k:n]) for kind, i, j, k, n in spans if kind == "replace"}
    return names_pattern(words).sub(lambda match: words[match[0]], answer)


def describe(goal: str, steps: Steps, actions: Sequence[str]) -> list[str]:
    """Return the terms of a place: its goal, the steps up to now, and the next actions, the last to be predicted."""
    *between, last = actions
    last_action, last_observation = steps[-1]
    terms = [f"action={_squeeze(last)}"] * ACTION_WEIGHT + _words("action", last)
    for back, action in enumerate(reversed(between), start=1):
        terms += [f"between{back}={_squeeze(action)}", *_words("between", action)]
    terms += _words("now", last_observation) * OBSERVATION_WEIGHT
    terms += [f"done={_squeeze(last_action)}"]
    for _, observation in steps[-1 - EARLIER_OBSERVATIONS : -1]:
        terms += _words("before", observation)
    return terms + _words("goal", goal)


@lru_cache(1 << 16)
def _words(mark: str, text: str) -> list[str]:
    """Return the distinct words, prefixed. Cached: every observation is part of many documents."""
    return [sys.intern(f"{mark}:{word}") for word in sorted(set(_WORD.findall(text.lower())))]


def _squeeze(action: str) -> str:
    return " ".join(action.lower().split())
