"""What can be asked of a kept world, as work for the engine: each function yields before every pass of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from loopwm.core import ExitRule
from loopwm.records.template import Context
from loopwm.text.world import World, WorldModel
from serve.engine.jobs import Steps
from serve.words.prompts import PromptTooLongError

Work = Steps[World]


@dataclass(frozen=True)
class Step:
    """What an imagined step came to, before anything is decoded. reward in points and continuation, the chance that the
    world goes on, are None without such heads; summary is g_omega where it was asked for."""

    world: World
    loops: int
    reward: float | None
    continuation: float | None
    summary: list[float] | None


@dataclass(frozen=True)
class Candidate:
    """rewards in points and chances that the world goes on, after each action."""

    rewards: list[float]
    continuations: list[float]

    @property
    def score(self) -> float:
        """Expected sum of rewards: each counts as far as the world has gone on until then."""
        total, alive = 0.0, 1.0
        for reward, continuation in zip(self.rewards, self.continuations, strict=True):
            total += alive * reward
            alive *= continuation
        return total


@dataclass(frozen=True)
class Plan:
    """candidates in the order given; best: the first of highest score, and the world after its actions."""

    candidates: list[Candidate]
    best: int
    world: World


def create(model: WorldModel, context: Context, depth: ExitRule) -> Work:
    yield None
    return model.encode([context], depth)


def observe(model: WorldModel, world: World, action: str, observation: str) -> Work:
    yield None
    return model.observe(world, [action], [observation])


@dataclass(frozen=True)
class Advance:
    """One imagined step as a pass that worlds of the same depth take together."""

    model: WorldModel
    world: World
    action: str

    @cached_property
    def key(self) -> Hashable:
        return Advance, self.world.depth.for_pass(self.world.steps, range(1))

    def run(self, others: Sequence[Advance]) -> list[World]:
        every = (self, *others)
        return self.model.advance_each([each.world for each in every], [each.action for each in every])


def advance(model: WorldModel, world: World, actions: Sequence[str], monitor: bool) -> Steps[list[Step]]:
    """Raises PromptTooLongError where the world grows too long, ValueError for a summary the checkpoint cannot give."""
    steps = []
    for i, action in enumerate(actions):
        world = yield Advance(model, world, action)
        _check_length(model, world, f"actions[{i}]")
        steps.append(_step(model, world, monitor))
    return steps


def plan(model: WorldModel, world: World, candidates: Sequence[Sequence[str]]) -> Steps[Plan]:
    """All candidates side by side; what several begin with is imagined once. Raises ValueError without prediction
    heads."""
    found = [Candidate([], []) for _ in candidates]
    ends: list[tuple[World, int]] = [(world, 0)] * len(candidates)
    row_of: dict[tuple[str, ...], int] = {(): 0}
    for k in range(max(map(len, candidates))):
        yield None
        paths = list(dict.fromkeys(tuple(actions[: k + 1]) for actions in candidates if len(actions) > k))
        parents = [row_of[path[:-1]] for path in paths]
        if parents != list(range(len(world))):
            world = world.select(parents)
        world = model.advance(world, [path[-1] for path in paths])
        _check_length(model, world, "candidates")
        predictions = model.predictions(world)
        rewards, continuations = predictions.reward.tolist(), predictions.continuation.tolist()
        row_of = {path: row for row, path in enumerate(paths)}
        for i, actions in enumerate(candidates):
            if len(actions) > k:
                row = row_of[tuple(actions[: k + 1])]
                found[i].rewards.append(rewards[row])
                found[i].continuations.append(continuations[row])
                ends[i] = world, row
    best = max(range(len(found)), key=lambda i: found[i].score)
    end, row = ends[best]
    return Plan(found, best, end.select([row]))


def _step(model: WorldModel, world: World, monitor: bool) -> Step:
    reward = continuation = None
    if model.model.config.prediction_heads:
        predictions = model.predictions(world)
        reward, continuation = predictions.reward.item(), predictions.continuation.item()
    summary = model.monitor(world)[0].tolist() if monitor else None
    return Step(world, world.loops[0][-1], reward, continuation, summary)


def _check_length(model: WorldModel, world: World, field: str) -> None:
    length, limit = int(world.state.next_position.max()), model.model.config.max_position_embeddings
    if length > limit:
        raise PromptTooLongError(field, length, limit)
