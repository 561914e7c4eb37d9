"""Baseline `retrieve`: the observation at the most similar place of a train episode (`loopwm.text.memory`).

The weights of the description were chosen on dev windows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Self

import numpy as np

from eval.models.base import WindowBaseline
from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.records.windows import Window
from loopwm.text.memory import Index, Memory, Question, TrainEpisode, episodes_sha256, read_train_episodes


class Retrieval(WindowBaseline):
    """Predicts from train episodes, indexed by environment and horizon on first use."""

    def __init__(self, episodes: Sequence[TrainEpisode]) -> None:
        self._episodes = episodes
        self._index = cache(self._make_index)

    @classmethod
    def load(cls, windows: Sequence[Window], train_episodes: Sequence[Path]) -> Self:
        return cls(read_episodes_for(windows, train_episodes))

    @cached_property
    def identity(self) -> Mapping[str, str | int]:
        return {"episodes_sha256": episodes_sha256(self._episodes)}

    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        return {k: self._answer(Question.of(context, actions[:k]), self._index(env, k)) for k in horizons}

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
        return index.most_similar(question, np.arange(len(index.places))).answer


class Recall(WindowBaseline):
    """Predict what `Memory` recalls, or the last observation again."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @classmethod
    def load(cls, windows: Sequence[Window], train_episodes: Sequence[Path]) -> Self:
        return cls(Memory(read_episodes_for(windows, train_episodes)))

    @cached_property
    def identity(self) -> Mapping[str, str | int]:
        return {"episodes_sha256": self._memory.sha256}

    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        last = context.history[-1] if context.history else context
        return {k: self._memory.recall(context, actions[:k]) or last.observation for k in horizons}


def read_episodes_for(windows: Sequence[Window], train_episodes: Sequence[Path]) -> list[TrainEpisode]:
    """Read train episodes. Raises InputError if they lack an environment of the windows."""
    if not train_episodes:
        raise InputError("--train-episodes: must be given for retrieval, since no index comes with the package")
    episodes = list(read_train_episodes(train_episodes))
    for env in sorted({window["env"] for window in windows} - {episode.env for episode in episodes}):
        raise InputError(f"--train-episodes: must hold episodes of {env!r}")
    return episodes
