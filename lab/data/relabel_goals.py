"""Relabel episodes with other goals (hindsight experience replay, Andrychowicz et al., 2017).

ALFWorld: in recorded episodes the first thing that is put where things are put nearly always reaches the goal, so a
model can learn that it pays whatever the goal says. Observations do not depend on the goal, and whether one is reached
follows from what is where: `Ledger` keeps that by the simulator's rules. A goal that is reached earlier ends the
episode there; one that is never reached leaves its score at 0.

ScienceWorld: solutions end at the right one of two boxes that the goal names. With the boxes exchanged in the goal it
is the wrong one, which loses the game in the simulator, too: 723 of 725 plays of the wrong box did.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from tqdm import tqdm

from lab.agents.agents import FULL_SCORE
from lab.agents.searcher import CHANGED, MOVED, NAME, TAKEN, Goal, kind_of, parse_goal
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, Step, recorded_episodes, write_episodes
from loopwm.records.errors import InputError

EXAMPLE = "python -m lab relabel-goals --episodes data/episodes/alfworld-train-expert --out data/episodes/goals"

POLICY = "other-goal"
STATES = {"clean": "clean", "heat": "hot", "cool": "cool"}
_OPPOSITES = {"heat": "cool", "cool": "heat"}
_CONTENTS = re.compile(r"(?:On the|The) (\w+ \d+)(?: is (?:open|closed)\. In it)?, you see (.*?)\.(?:\n|$| )")
BOX = re.compile(r"\b(\w+) box\b")
LOST = -FULL_SCORE
"""Score of a game of ScienceWorld that is lost."""

_LIT = re.compile(r"You turn (on|off) the (\w+ \d+)")


def contents_of(hidden_state: str) -> dict[str, str]:
    """Return the place of each thing in a hidden state."""
    return {thing: place for place, things in _CONTENTS.findall(hidden_state) for thing in NAME.findall(things)}


def first_places(episode: Episode) -> dict[str, str]:
    """Return the place of each thing at the start. Raises InputError if no hidden state was sampled."""
    samples = (episode.hidden_state_at(index) for index in range(len(episode.steps)))
    hidden_state = next((state for state in samples if state is not None), None)
    if hidden_state is None:
        raise InputError(f"{episode.variation}: no hidden state")
    start: dict[str, str] = {}
    for step in episode.steps:
        if taking := TAKEN.search(step.observation):
            start.setdefault(taking[1], taking[2])
    return contents_of(hidden_state) | start


@dataclass
class Ledger:
    """State of a game. place: of each thing that is not held. done_to: verbs by thing. lit: where each lamp was lit."""

    place: dict[str, str]
    here: str | None = None
    held: str | None = None
    done_to: dict[str, set[str]] = field(default_factory=dict)
    lit: dict[str, str | None] = field(default_factory=dict)

    def read(self, step: Step) -> None:
        """Take one step into account. Refused actions change nothing."""
        text = step.observation
        if arrival := re.match(r"You arrive at (\w+ \d+)", text):
            self.here = arrival[1]
        if taking := TAKEN.search(text):
            self.held = taking[1]
            self.place.pop(taking[1], None)
        if move := MOVED.search(text):
            self.held, self.place[move[1]] = None, move[2]
        if change := CHANGED.search(text):
            verbs = self.done_to.setdefault(change[2], set())
            verbs.discard(_OPPOSITES.get(change[1], ""))
            verbs.add(change[1])
        for state, lamp in _LIT.findall(text):
            if state == "on":
                self.lit[lamp] = self.here  # or a place within reach of it
            else:
                self.lit.pop(lamp, None)

    def reaches(self, goal: Goal) -> bool:
        if goal.lamp is not None:
            lit_here = any(kind_of(lamp) == goal.lamp and place == self.here for lamp, place in self.lit.items())
            return lit_here and self.held is not None and kind_of(self.held) == goal.thing
        places = [
            place
            for thing, place in self.place.items()
            if kind_of(thing) == goal.thing
            and kind_of(place) == goal.place
            and (goal.verb is None or goal.verb in self.done_to.get(thing, ()))
        ]
        return any(places.count(place) >= goal.count for place in places)


def reached_at(episode: Episode, goal: Goal) -> int | None:
    """Return the step at which the goal is reached first, None for never."""
    ledger = Ledger(first_places(episode))
    for index, step in enumerate(episode.steps):
        ledger.read(step)
        if ledger.reaches(goal):
            return index
    return None


def sentence(goal: Goal, rng: Random) -> str:
    """Return a sentence for a goal, as the games word it."""
    thing, place = goal.thing, goal.place
    if goal.lamp is not None:
        return rng.choice((f"look at {thing} under the {goal.lamp}.", f"examine the {thing} with the {goal.lamp}."))
    if goal.count == 2:
        return rng.choice((f"put two {thing} in {place}.", f"find two {thing} and put them in {place}."))
    if goal.verb is not None:
        wordings = f"put a {STATES[goal.verb]} {thing} in {place}.", f"{goal.verb} some {thing} and put it in {place}."
        return rng.choice(wordings)
    return rng.choice((f"put a {thing} in {place}.", f"put some {thing} on {place}."))


def other_goals(episode: Episode, rng: Random) -> list[Goal]:
    """Return goals that differ in one part from what was done, in an order of chance.

    What was done is the goal itself and, for each thing that was put down, that this is the goal.
    """
    own = parse_goal(episode.goal)
    places = first_places(episode)
    kinds = sorted({kind_of(thing) for thing in places} - {own.lamp})
    place_kinds = sorted({kind_of(name) for name in NAME.findall(episode.steps[0].observation)} - set(kinds))
    moves = [match for step in episode.steps if (match := MOVED.search(step.observation))]
    outcomes = [own, *(Goal(kind_of(match[1]), kind_of(match[2])) for match in moves)]
    goals = [*outcomes[1:], *(_changed(goal, kinds, place_kinds, rng) for goal in outcomes for _ in range(3))]
    rng.shuffle(goals)
    return [goal for goal in dict.fromkeys(goals) if goal != own]


def _changed(goal: Goal, kinds: list[str], place_kinds: list[str], rng: Random) -> Goal:
    """Change one part of a goal."""
    if goal.lamp is not None or rng.random() < 0.5:
        return replace(goal, thing=rng.choice(kinds))
    if goal.verb is None and rng.random() < 0.2:
        return replace(goal, count=3 - goal.count)
    if goal.count == 1 and rng.random() < 0.5:
        verbs: list[str | None] = [None, *STATES]
        return replace(goal, verb=rng.choice([verb for verb in verbs if verb != goal.verb]))
    return replace(goal, place=rng.choice(place_kinds))


def under(episode: Episode, goal: Goal, rng: Random) -> Episode | None:
    """Return the episode with another goal, None if that is reached before the first action."""
    end = reached_at(episode, goal)
    if end == 0:
        return None
    text = f"Your task is to: {sentence(goal, rng)}"
    first = replace(episode.steps[0], observation=episode.steps[0].observation.replace(episode.goal, text))
    others = episode.steps[1 : None if end is None else end + 1]
    steps = [replace(step, score=0, done=False) for step in (first, *others)]
    if end is not None:
        steps[-1] = replace(steps[-1], score=FULL_SCORE, done=True)
    # A variation has one goal: another one makes it another variation.
    return replace(episode, goal=text, variation=f"{episode.variation}/{text}", policy=POLICY, steps=tuple(steps))


def boxes_of(text: str) -> list[str]:
    """Return the colours of the boxes that a text names, each once."""
    return list(dict.fromkeys(BOX.findall(text)))


def exchanged(episode: Episode) -> Episode | None:
    """Return the episode with the boxes of its goal exchanged, None if it does not end at the right one of two."""
    colours = boxes_of(episode.goal)
    last = episode.steps[-1]
    if len(colours) != 2 or last.score != FULL_SCORE or not BOX.search(last.action or ""):
        return None
    other = dict(zip(colours, reversed(colours), strict=True))
    goal = BOX.sub(lambda box: f"{other[box[1]]} box", episode.goal)
    first = replace(episode.steps[0], observation=episode.steps[0].observation.replace(episode.goal, goal))
    steps = (first, *episode.steps[1:-1], replace(last, score=LOST))
    return replace(episode, goal=goal, variation=f"{episode.variation}/exchanged", policy=POLICY, steps=steps)


def relabelled(episodes: Iterable[Episode], count: int, seed: int) -> Iterator[Episode]:
    """Yield up to `count` episodes of other goals for each, as many reached as not where there are both.

    ScienceWorld: at most one each, of exchanged boxes.
    """
    for episode in episodes:
        if episode.env == "scienceworld":
            yield from filter(None, [exchanged(episode)])
            continue
        rng = Random(f"{seed}/{episode.variation}/{episode.policy}")
        others = [other for goal in other_goals(episode, rng) if (other := under(episode, goal, rng))]
        wins = [other for other in others if other.steps[-1].done][: count // 2]
        yield from wins
        yield from [other for other in others if not other.steps[-1].done][: count - len(wins)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, metavar="FILE", help="of both worlds")
    parser.add_argument("--count", type=positive, default=4, help="goals of ALFWorld (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new episodes")


def run(args: argparse.Namespace) -> None:
    """Write the episodes. Raises InputError for episodes of other environments or without hidden states."""
    episodes = recorded_episodes(args.episodes)
    if foreign := next((one.env for one in episodes if one.env not in ("alfworld", "scienceworld")), None):
        raise InputError(f"--episodes: must be of alfworld or scienceworld, got {foreign}")
    args.out.mkdir(parents=True, exist_ok=True)
    write_episodes(args.out / "relabelled.jsonl.xz", relabelled(tqdm(episodes, unit="episode"), args.count, args.seed))
