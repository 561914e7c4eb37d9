"""Uses of `focus` in ScienceWorld, for `lab fit-goals`: one pays, one loses the game, one names what is not there.

Solutions focus only on what pays, so a model that is taught by them takes any `focus` for a step towards the goal. Here
the three outcomes are drawn equally often, in each task. What is not there counts only where the agent has looked at
the room: solutions focus on much that they have not seen, and a model that is taught to doubt that doubts what pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from data_prep.policies import FATAL
from lab.agents.agents import is_refusal
from lab.studies.goal_rows import EARLIER_WEIGHT, UNKNOWN, Taught
from loopwm.records.episodes import Episode, Step

FOCUS_FACTS = (2,)
"""Values of each fact: whether the thing is there."""

OUTCOMES = ("paid", "lost", "absent")

ROOM, MOVED = ("This room is called", "This outside location"), ("You move to", "You teleport to")
"""How descriptions of rooms begin, and what is said of a move."""


class Focuses:
    """Episodes up to each use of `focus`, by task and outcome."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._of_task = defaultdict[str, dict[str, list[tuple[Episode, int]]]](lambda: defaultdict(list))
        for episode in episodes:
            if episode.env == "scienceworld":
                for end, (before, step) in enumerate(pairwise(episode.steps), start=2):
                    outcome = outcome_of(before, step)
                    if outcome and (outcome != "absent" or has_looked(episode.steps[: end - 1])):
                        self._of_task[episode.task][outcome].append((episode, end))

    def __bool__(self) -> bool:
        return bool(self._of_task)

    def draw(self, rng: Random) -> Episode:
        of_outcome = self._of_task[rng.choice(list(self._of_task))]
        episode, end = rng.choice(of_outcome[rng.choice([name for name in OUTCOMES if name in of_outcome])])
        return replace(episode, steps=episode.steps[:end])


def outcome_of(before: Step, step: Step) -> str | None:
    """Return which of `OUTCOMES` a step has; None unless it focuses on something, and for one without effect."""
    if (step.action or "").partition(" ")[0] not in FATAL:
        return None
    if is_refusal(step.observation):
        return "absent"
    if step.score == before.score:
        return None
    return "paid" if step.score > before.score else "lost"


def has_looked(steps: Sequence[Step]) -> bool:
    """Return whether the room at the end of some steps was described since the agent came to it."""
    for step in reversed(steps):
        if step.observation.startswith(ROOM):
            return True
        if step.observation.startswith(MOVED):
            return False
    return False


def focus_taught(episode: Episode) -> Taught:
    """Return `FOCUS_FACTS` of an episode that ends with a use of `focus`."""
    earlier = len(episode.steps) - 2
    there = not is_refusal(episode.steps[-1].observation)
    return Taught([(UNKNOWN,)] * earlier + [(int(there),)], [EARLIER_WEIGHT] * earlier + [1.0])
