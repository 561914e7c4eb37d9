"""Plays recorded actions again: simulators here answer the same to the same actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from data_prep.environments.base import Environment
from data_prep.episodes import Episode, Step
from loopwm.records.errors import InputError


def replay(environment: Environment, task: str, variation: int | str, history: Iterable[Step]) -> Iterator[Step]:
    """Yields what the environment answers, step by step; history[0] is the reset.

    Raises InputError if an observation differs from the recorded one.
    """
    for index, recorded in enumerate(history):
        action = recorded.action
        found = environment.reset(task, variation) if action is None else environment.step(action)
        if found.observation != recorded.observation:
            raise InputError(
                f"{task}, variation {variation}, step {index}: the simulator answers {found.observation[:60]!r}, "
                f"recorded is {recorded.observation[:60]!r}"
            )
        yield found


def replay_hidden_states(environment: Environment, episode: Episode, steps: Set[int]) -> dict[int, str | None]:
    """The hidden state after each of these steps. Raises InputError as `replay` does."""
    history = episode.steps[: max(steps) + 1]
    places = replay(environment, episode.task, episode.variation, history)
    return {index: environment.hidden_state() for index, _ in enumerate(places) if index in steps}
