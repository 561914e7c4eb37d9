"""Recorded episodes as the evaluation reads them, whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from data_prep.episodes import Episode, episode_files, read_episodes
from eval.windows import Window

FULL_SCORE = 100

T = TypeVar("T")


def recorded_episodes(paths: Iterable[Path]) -> list[Episode]:
    """The episodes of files and folders, in order. Raises InputError naming file, line and field."""
    return [episode for path in episode_files(paths) for episode in read_episodes(path)]


def succeeded(episode: Episode) -> bool:
    return episode.steps[-1].done and episode.steps[-1].score >= FULL_SCORE


def start_windows(episodes: Sequence[Episode], last: int) -> list[Window]:
    """One window an episode: it starts at the first observation and takes the episode's own first `last` actions.

    Episodes without actions have none. The family is the task.
    """
    windows, played = [], Counter[str]()
    for episode in episodes:
        if len(episode.steps) > 1:
            name = f"{episode.env}/{episode.task}/{episode.variation}/{episode.policy}"
            windows.append(_start_window(f"{name}/{played[name]}", episode, last))
            played[name] += 1
    return windows


def _start_window(name: str, episode: Episode, last: int) -> Window:
    first, future = episode.steps[0], episode.steps[1 : last + 1]
    before = episode.steps[: len(future)]
    return {
        "id": name,
        "env": episode.env,
        "task": episode.task,
        "variation": episode.variation,
        "family": episode.task,
        "split": episode.split,
        "goal": episode.goal,
        "history": [{"action": None, "observation": first.observation}],
        "look": first.look,
        "inventory": first.inventory,
        "hidden_state": episode.hidden_state,
        "hidden_state_start": episode.hidden_state,
        "actions": [step.action or "" for step in future],
        "observations": [step.observation for step in future],
        "rewards": [after.score - now.score for now, after in zip(before, future, strict=True)],
        "dones": [step.done for step in future],
    }


def padded(window: Window, length: int) -> Window:
    """The window with its last action repeated until there are `length`: what is predicted there means nothing."""
    return {
        **window,
        "actions": _padded(window["actions"], length),
        "observations": _padded(window["observations"], length),
        "rewards": _padded(window["rewards"], length),
        "dones": _padded(window["dones"], length),
    }


def _padded(values: list[T], length: int) -> list[T]:
    return [*values, *values[-1:] * (length - len(values))]
