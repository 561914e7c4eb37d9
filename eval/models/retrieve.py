"""Baseline `retrieve`: the observation at the most similar place of a train episode, by BM25. It needs no torch.

A document is one step of an episode, described by its action, the k - 1 actions before it, and the texts before those:
the last observation, the two before it, and the goal. A window at horizon k is the query of the same description. A
prefix of each word names its field, and actions count also as whole strings. Weights were chosen on dev windows; BM25
is without length normalisation (b = 0), so that a query without history, as of the context `snapshot`, matches the same
documents.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import bm25s
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.models.base import WindowBaseline
from loopwm.records.episodes import TRAIN_SPLITS, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, sha256
from loopwm.records.template import Context
from loopwm.records.training_episodes import episode_hash
from loopwm.records.windows import Window


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
        """Return its contribution to the SHA-256 of episodes (`episodes_sha256`), independent of files."""
        return f"{self!r}\n".encode()


def verb(action: str) -> str:
    return action.split()[0]


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
            number = int(episode_hash(episode), 16)
            yield TrainEpisode(episode.env, episode.policy, episode.goal, tuple(steps), number)


ACTION_WEIGHT = 10
"""Repeats of the whole string of the action to predict."""

OBSERVATION_WEIGHT = 2
EARLIER_OBSERVATIONS = 2

_WORD = re.compile(r"[a-z0-9]+")
Steps = Sequence[tuple[str, str]]
"""(action, observation) pairs up to now; the first action is empty."""


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
    """Query of a window at a horizon: the observation after the last of `actions`."""

    goal: str
    history: Steps
    actions: Sequence[str]

    @property
    def now(self) -> int:
        return len(self.history) - 1


class Index:
    """Places of an environment at one horizon, with their similarity to a question."""

    def __init__(self, episodes: Sequence[TrainEpisode], horizon: int) -> None:
        self.episodes = episodes
        self.places = [Place(e, step, horizon) for e in episodes for step in range(horizon, len(e.steps))]
        self._bm25 = bm25s.BM25(k1=1.5, b=0.0)
        if self.places:
            terms = [describe(place.episode.goal, place.history, place.actions) for place in self.places]
            self._bm25.index(terms, show_progress=False)

    def scores(self, question: Question) -> NDArray[np.float32]:
        """Return similarities by place, (places,)."""
        scores: NDArray[np.float32] = self._bm25.get_scores(describe(question.goal, question.history, question.actions))
        return scores


class Retrieval(WindowBaseline):
    """Predicts from train episodes, indexed by environment and horizon on first use."""

    def __init__(self, episodes: Sequence[TrainEpisode]) -> None:
        self._episodes = episodes
        self._index = cache(self._make_index)

    @cached_property
    def identity(self) -> Mapping[str, str | int]:
        return {"episodes_sha256": sha256(b"".join(episode.hashed for episode in self._episodes))}

    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        steps = _steps(context)
        return {k: self._answer(Question(context.goal, steps, actions[:k]), self._index(env, k)) for k in horizons}

    @abstractmethod
    def _answer(self, question: Question, index: Index) -> str: ...

    def _make_index(self, env: str, horizon: int) -> Index:
        index = Index([e for e in self._episodes if e.env == env], horizon)
        if not index.places:
            raise InputError(f"--train-episodes: must hold an episode of {env!r} of {horizon} steps")
        return index


class Retrieve(Retrieval):
    """Predict the observation at the most similar place; of equal ones the first."""

    def _answer(self, question: Question, index: Index) -> str:
        return index.places[int(index.scores(question).argmax())].answer


def load_retrieve(windows: Sequence[Window], train_episodes: Sequence[Path]) -> Retrieve:
    """Load the baseline. Raises InputError if the episodes lack an environment of the windows."""
    return Retrieve(read_episodes_for(windows, train_episodes))


def read_episodes_for(windows: Sequence[Window], train_episodes: Sequence[Path]) -> list[TrainEpisode]:
    """Read train episodes. Raises InputError if they lack an environment of the windows."""
    if not train_episodes:
        raise InputError("--train-episodes: must be given for retrieval, since no index comes with the package")
    episodes = list(read_train_episodes(train_episodes))
    for env in sorted({window["env"] for window in windows} - {episode.env for episode in episodes}):
        raise InputError(f"--train-episodes: must hold episodes of {env!r}")
    return episodes


def _steps(context: Context) -> list[tuple[str, str]]:
    return [("", context.observation), *((step.action, step.observation) for step in context.history)]


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


@cache
def _words(mark: str, text: str) -> list[str]:
    """Return the distinct words, prefixed. Cached: every observation is part of many documents."""
    return [sys.intern(f"{mark}:{word}") for word in sorted(set(_WORD.findall(text.lower())))]


def _squeeze(action: str) -> str:
    return " ".join(action.lower().split())
