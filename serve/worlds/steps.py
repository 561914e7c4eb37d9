"""What can be asked of a world, as work for the engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from loopwm.core import SharedState
from loopwm.records import template
from loopwm.text.world import World, WorldModel
from serve.engine.engine import Engine
from serve.engine.forward import PADDING, Appended, ForwardGenerator, PrefillChunk
from serve.engine.prefill import prefill
from serve.generation.prompts import PromptTooLongError
from serve.worlds.log import WorldLog

Path = tuple[str, ...]
"""Actions, one after another."""


@dataclass(frozen=True)
class Step:
    """What an imagined step came to, before anything is decoded. reward in points, the likeliest and the expected one,
    and continuation, the chance that the world goes on, are None without such heads; summary is g_omega where it was
    asked for."""

    world: World
    loops: int
    reward: float | None
    expected_reward: float | None
    continuation: float | None
    summary: list[float] | None


@dataclass(frozen=True)
class Candidate:
    """Expected rewards in points and chances that the world goes on, after each action."""

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
class Advance:
    """One imagined step as a pass that worlds of the same depth take together."""

    model: WorldModel
    world: World
    action: str

    @cached_property
    def key(self) -> Hashable:
        """Actions of much the same length go together: a long one would pad the others."""
        return Advance, self.world.depth.for_pass(self.world.steps, range(1)), -(-self.tokens // PADDING)

    @cached_property
    def tokens(self) -> int:
        return self.model.count(template.render_step(self.action, self.model.slots))

    def within(self, tokens: int) -> Advance:
        return self

    def run(self, others: Sequence[Advance]) -> list[World]:
        every = (self, *others)
        return self.model.advance_each([each.world for each in every], [each.action for each in every])


@dataclass(frozen=True, eq=False)
class AdvanceRows:
    """One imagined step of the first rows of a batch, as many as fit. Its result is the world of those."""

    model: WorldModel
    world: World
    actions: tuple[str, ...]

    @property
    def key(self) -> Hashable:
        return AdvanceRows, id(self.world)

    @cached_property
    def _tokens(self) -> tuple[int, ...]:
        return tuple(self.model.count(template.render_step(action, self.model.slots)) for action in self.actions)

    @property
    def tokens(self) -> int:
        return sum(self._tokens)

    def within(self, tokens: int) -> AdvanceRows:
        fitting = sum(total <= tokens for total in accumulate(self._tokens))
        return self if fitting == len(self.actions) else replace(self, actions=self.actions[: max(fitting, 1)])

    def run(self, others: Sequence[AdvanceRows]) -> list[World]:
        count = len(self.actions)
        world = self.world if count == len(self.world) else self.world.select(range(count))
        return [self.model.advance(world, self.actions)]


def build(engine: Engine, model: WorldModel, log: WorldLog, ids: tuple[int, ...]) -> ForwardGenerator[World]:
    """The world of a log. ids: of its context. Worlds of one context share what they have seen."""
    begun = ids, log.depth
    world: World | None = engine.cache.get(begun)
    if world is None:
        loops = log.depth.limit
        state = yield from prefill(engine.forward, engine.cache, ids, loops)
        history = SharedState(state, 1)
        slots: Appended = yield PrefillChunk(engine.forward, history, model.slot_ids, loops)
        world = model.begun(history, (slots.state, slots.latent, slots.loop_state), log.depth, 0)
        engine.cache.put(begun, world)
    for action in log.actions:
        world = yield Advance(model, world, action)
    return world


def advance(
    model: WorldModel, world: World, actions: Sequence[str], fields: Sequence[str], monitor: bool = False
) -> ForwardGenerator[list[Step]]:
    """fields: of the request, where the actions are from. Raises PromptTooLongError where the world grows too long,
    ValueError for a summary the checkpoint cannot give."""
    steps = []
    for action, field in zip(actions, fields, strict=True):
        world = yield Advance(model, world, action)
        check_length(model, world, field)
        steps.append(_step(model, world, monitor))
    return steps


@dataclass(frozen=True)
class Planned:
    """What a path of actions came to: a row of a world, the expected reward in points of its last step, and the chance
    that the world goes on."""

    world: World
    row: int
    reward: float
    continuation: float


def explore(model: WorldModel, world: World, paths: Sequence[Path]) -> ForwardGenerator[dict[Path, Planned]]:
    """Paths of actions from a world of one row, each of which comes after the one that it goes on from; what several
    begin with is given once. Raises PromptTooLongError where the world grows too long, ValueError without prediction
    heads."""
    found: dict[Path, Planned] = {}
    level: list[tuple[World, Sequence[Path]]] = [(world, [()])]
    while level:
        reached: list[tuple[World, Sequence[Path]]] = []
        for before, ends in level:
            row_of = {path: row for row, path in enumerate(ends)}
            left = [path for path in paths if path and path[:-1] in row_of]
            rows = [row_of[path[:-1]] for path in left]
            batch = before if rows == list(range(len(before))) or not rows else before.select(rows)
            while left:
                after: World = yield AdvanceRows(model, batch, tuple(path[-1] for path in left))
                check_length(model, after, "candidates")
                done, left = left[: len(after)], left[len(after) :]
                found |= _planned(model, after, done)
                reached.append((after, done))
                batch = batch.select(range(len(after), len(batch))) if left else batch
        level = reached
    return found


def _planned(model: WorldModel, world: World, paths: Sequence[Path]) -> dict[Path, Planned]:
    told = model.predictions(world)
    rewards, continuations = told.expected_reward.tolist(), told.continuation.tolist()
    return {path: Planned(world, row, rewards[row], continuations[row]) for row, path in enumerate(paths)}


def _step(model: WorldModel, world: World, monitor: bool) -> Step:
    reward = expected = continuation = None
    if model.model.config.prediction_heads:
        predictions = model.predictions(world)
        reward, expected = predictions.reward.item(), predictions.expected_reward.item()
        continuation = predictions.continuation.item()
    summary = model.monitor(world)[0].tolist() if monitor else None
    return Step(world, world.loops[0][-1], reward, expected, continuation, summary)


def length_of(world: World) -> int:
    """Its tokens."""
    return int(world.state.next_position.max())


def check_length(model: WorldModel, world: World, field: str) -> None:
    length, limit = length_of(world), model.model.config.max_position_embeddings
    if length > limit:
        raise PromptTooLongError(field, length, limit)
