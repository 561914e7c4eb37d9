"""Rows for `lab fit-goals`: what is shown of an episode, what each of its actions pays, and facts that decide it.

Shape suffixes: B rows, L positions, D width, S slots, F facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.agents.searcher import MOVED, NAME, kind_of, parse_goal
from lab.data.relabel_goals import STATES, Ledger, first_places
from loopwm.records.episodes import Episode, Step
from loopwm.records.template import Context, Transition, render_context, render_step
from loopwm.text.model.heads import MOST_POINTS
from loopwm.text.world import WorldModel

ROOM = "You are in the middle of a room."
LONGEST = 1450
"""Most tokens of a row."""

AHEAD_SHARE, MOST_AHEAD = 0.35, 6
"""Share of rows whose last actions, up to so many, are shown without their answers, as they are in imagination."""

KINDS = 140
"""Kinds of things and places that are told apart, one of them for none."""

FACTS = (KINDS, KINDS, 1 + len(STATES), 2, 2, KINDS, KINDS, KINDS, 2, 2, 2, 3)
"""Values of each fact: the goal's thing, its place or lamp, its state, whether it names a lamp and two things; what was
moved, where to, what is held; whether that was cleaned, heated and cooled; how many things are where the goal wants."""

MOVED_FACT = 5
"""Index of what was moved."""

MOVED_WEIGHT, EARLIER_WEIGHT = 0.5, 0.1
"""Weights of a row's slots before the last: of actions that put something down, of others."""

UNKNOWN = -1
"""Value of a fact that is not taught."""


@dataclass(frozen=True)
class Taught:
    """Lesson of each action of an episode: its facts, none of them for (), and the weight of all its losses."""

    facts: Sequence[Sequence[int]]
    weights: Sequence[float]


@dataclass(frozen=True)
class Extent:
    """Part of an episode that rows show.

    places: of the first observation, None for all, 0 for neither places nor the goal there. steps: the last ones.
    """

    places: int | None
    steps: int


@dataclass(frozen=True)
class Shown:
    """A prompt up to an action without its answer.

    points, ends, weights: (S,) of its last S actions. facts: (S, F).
    """

    text: str
    points: Tensor
    ends: Tensor
    weights: Tensor
    facts: Tensor


@dataclass(frozen=True)
class Row:
    """A prompt after the frozen model. state: (L, D) h^(T), h: (L, D) the coda output, both in half precision.

    slots: (S,) positions of the last S actions' slots. Else as of `Shown`.
    """

    state: Tensor
    h: Tensor
    slots: Tensor
    points: Tensor
    ends: Tensor
    weights: Tensor
    facts: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows, padded at the end: state and h (B, L, D); slots, points, ends, weights (B, S), facts (B, S, F).

    last: (B, S) whether a slot is a row's last. Padding has weight zero.
    """

    state: Tensor
    h: Tensor
    slots: Tensor
    last: Tensor
    points: Tensor
    ends: Tensor
    weights: Tensor
    facts: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        count = torch.tensor([len(row.slots) for row in rows])[:, None]
        order = torch.arange(int(count.max()))
        return cls(
            pad_sequence([row.state.float() for row in rows], batch_first=True),
            pad_sequence([row.h.float() for row in rows], batch_first=True),
            pad_sequence([row.slots for row in rows], batch_first=True),
            order == count - 1,
            pad_sequence([row.points for row in rows], batch_first=True).clamp(-MOST_POINTS, MOST_POINTS) + MOST_POINTS,
            pad_sequence([row.ends for row in rows], batch_first=True),
            pad_sequence([row.weights for row in rows], batch_first=True),
            pad_sequence([row.facts for row in rows], batch_first=True),
        )


@dataclass
class Kinds:
    """Numbers of kinds of things and places, in the order in which they come. 0: none, or one too many."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str | None) -> int:
        if name is None:
            return 0
        kind = kind_of(name)
        if len(self.numbers) < KINDS - 1:
            self.numbers.setdefault(kind, len(self.numbers) + 1)
        return self.numbers.get(kind, 0)


def facts_of(episode: Episode, kinds: Kinds) -> list[list[int]]:
    """Return `FACTS` after each action of an episode of ALFWorld. Raises InputError as `first_places` does."""
    goal, ledger = parse_goal(episode.goal), Ledger(first_places(episode))
    verbs = (None, *STATES)
    goal_facts = [kinds(goal.thing), kinds(goal.place or goal.lamp), verbs.index(goal.verb)]
    goal_facts += [int(goal.lamp is not None), goal.count - 1]
    ledger.read(episode.steps[0])
    rows = []
    for step in episode.steps[1:]:
        held_before = ledger.held
        ledger.read(step)
        move = MOVED.search(step.observation)
        thing = move[1] if move else ledger.held or held_before
        changes = ledger.done_to.get(thing, set()) if thing else set()
        there = [kind_of(name) == goal.thing and kind_of(place) == goal.place for name, place in ledger.place.items()]
        rows.append(
            [*goal_facts, kinds(move[1] if move else None), kinds(move[2] if move else None), kinds(ledger.held)]
            + [int(verb in changes) for verb in STATES]
            + [min(2, sum(there))]
        )
    return rows


def goal_taught(episode: Episode, kinds: Kinds) -> Taught:
    """Return `FACTS` of an episode of ALFWorld. Raises InputError as `first_places` does."""
    facts = facts_of(episode, kinds)
    return Taught(facts, [MOVED_WEIGHT if row[MOVED_FACT] else EARLIER_WEIGHT for row in facts[:-1]] + [1.0])


def reward_taught(episode: Episode) -> Taught:
    """Return no facts: all actions have the same weight, one for all of an episode."""
    count = len(episode.steps) - 1
    return Taught([()] * count, [1 / count] * count)


def decided_by_the_action(episode: Episode) -> bool:
    """Return True if the goal is one thing in one place: then the last action alone says whether it is reached."""
    goal = parse_goal(episode.goal)
    return goal.verb is None and goal.lamp is None and goal.count == 1


def nearly_reached(episode: Episode) -> bool:
    """Return True if the last action is one that reaches a goal: something is put down, or used."""
    last = episode.steps[-1]
    return bool(MOVED.search(last.observation)) or (last.action or "").startswith("use ")


def fewer_places(episode: Episode, count: int, rng: Random) -> str:
    """Return the first observation with `count` places, that of the last action among them; for 0 without goal, too."""
    if count == 0:
        return ROOM
    head, seen, after = episode.steps[0].observation.partition("you see")
    listing, task, goal = after.partition("Your task")
    places, last = NAME.findall(listing), NAME.findall(episode.steps[-1].action or "")
    others = [place for place in places if place not in last]
    names = {*last, *rng.sample(others, min(len(others), count - 1))}
    return f"{head}{seen} " + ", ".join(f"a {place}" for place in places if place in names) + f".\n\n{task}{goal}"


def show(model: WorldModel, episode: Episode, extent: Extent, teach: Callable[[Episode], Taught], rng: Random) -> Shown:
    """Show part of an episode."""
    first, *steps = episode.steps
    steps = steps[-extent.steps :]
    ahead = 1 if len(steps) == 1 or rng.random() >= AHEAD_SHARE else rng.randint(2, min(MOST_AHEAD, len(steps)))
    history = tuple(Transition(step.action or "", step.observation) for step in steps[:-ahead])
    observation = first.observation if extent.places is None else fewer_places(episode, extent.places, rng)
    context, _ = model.fit(Context(episode.goal, observation, history))
    text = render_context(context, model.slots)
    text += "".join(render_step(step.action or "", model.slots) for step in steps[-ahead:])
    count, taught = len(context.history) + ahead, teach(episode)
    weights, facts = torch.tensor(taught.weights[-count:]), torch.tensor(taught.facts[-count:])
    return Shown(text, points_of(episode.steps)[-count:], ends_of(episode.steps)[-count:], weights, facts)


def points_of(steps: Sequence[Step]) -> Tensor:
    return torch.tensor([round(step.score - before.score) for before, step in pairwise(steps)])


def ends_of(steps: Sequence[Step]) -> Tensor:
    return torch.tensor([float(step.done) for step in steps[1:]])
