"""Episodes of ScienceWorld that answer by a box, for `lab fit-goals`, and facts that decide which is the right one.

A goal says which box to choose if something measured holds and which one if it does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

from lab.data.relabel_goals import BOX, boxes_of, exchanged
from lab.studies.goal_rows import EARLIER_WEIGHT, UNKNOWN, Taught
from loopwm.records.episodes import Episode

COLOURS = ("blue", "green", "orange", "purple", "red", "yellow")

BOX_FACTS = (1 + len(COLOURS), 1 + len(COLOURS), 1 + len(COLOURS), 2)
"""Values of each fact: the boxes for what holds and what does not, the box of the action, whether it holds."""


class Boxes:
    """Episodes that end at a box, right or wrong, each task as often as any other."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._of_task = defaultdict[str, list[tuple[Episode, Episode]]](list)
        for episode in episodes:
            if episode.env == "scienceworld" and (wrong := exchanged(episode)):
                self._of_task[episode.task].append((episode, wrong))

    def __bool__(self) -> bool:
        return bool(self._of_task)

    def draw(self, rng: Random) -> Episode:
        """Return an episode with new colours: few are recorded, and a colour says nothing of what holds."""
        return recoloured(rng.choice(rng.choice(self._of_task[rng.choice(list(self._of_task))])), rng)


def recoloured(episode: Episode, rng: Random) -> Episode:
    """Exchange the colours of all boxes."""
    new = dict(zip(COLOURS, rng.sample(COLOURS, len(COLOURS)), strict=True))
    steps = [
        replace(step, action=step.action and painted(step.action, new), observation=painted(step.observation, new))
        for step in episode.steps
    ]
    return replace(episode, goal=painted(episode.goal, new), steps=tuple(steps))


def painted(text: str, new: Mapping[str, str]) -> str:
    return BOX.sub(lambda box: f"{new.get(box[1], box[1])} box", text)


def box_taught(episode: Episode) -> Taught:
    """Return `BOX_FACTS` of an episode that ends at a box. Whether it holds is taught at the end, where it is known."""
    if_so, if_not = boxes_of(episode.goal)
    (chosen,) = boxes_of(episode.steps[-1].action or "")
    holds = (chosen == if_so) == (episode.steps[-1].score > 0)
    earlier = len(episode.steps) - 2
    goal_facts = [1 + COLOURS.index(if_so), 1 + COLOURS.index(if_not)]
    facts = [*([[*goal_facts, 0, UNKNOWN]] * earlier), [*goal_facts, 1 + COLOURS.index(chosen), int(holds)]]
    return Taught(facts, [EARLIER_WEIGHT] * earlier + [1.0])
