"""Steps and plans of worlds, as engine work items."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from loopwm.records import template
from loopwm.text.world import World, WorldModel
from serve.engine.engine import Engine
from serve.engine.forward import PADDING, ForwardGenerator, PrefillChunk, PrefillResult
from serve.engine.prefill import prefill
from serve.generation.prompts import PromptTooLongError
from serve.worlds.log import WorldLog

Path = tuple[str, ...]
"""Sequence of actions."""


@dataclass(frozen=True)
class Step:
    """Imagined step, before its observation is decoded.

    reward: most likely reward in points; None without prediction heads, like the next two.
    expected_reward: mean reward in points.
    continuation: probability that the episode continues.
    summary: g_omega, if requested.
    """

    world: World
    loops: int
    reward: float | None
    expected_reward: float | None
    continuation: float | None
    summary: list[float] | None


@dataclass(frozen=True)
class Candidate:
    """Expected rewards in points and continuation probabilities, after each action of a plan."""

    rewards: list[float]
    continuations: list[float]

    @property
    def score(self) -> float:
        """Expected sum of rewards, each weighted by the probability that the episode has continued until then."""
        total, alive = 0.0, 1.0
        for reward, continuation in zip(self.rewards, self.continuations, strict=True):
            total += alive * reward
            alive *= continuation
        return total


@dataclass(frozen=True)
class Advance:
    """Forward of one imagined step, batched with worlds of the same depth."""

    model: WorldModel
    world: World
    action: str

    @cached_property
    def key(self) -> Hashable:
        """Batch only actions of similar length: a long one would pad the others."""
        return Advance, self.world.depth.for_pass(self.world.steps, range(1)), -(-self.num_tokens // PADDING)

    @cached_property
    def num_tokens(self) -> int:
        return self.model.count(template.render_step(self.action, self.model.slots))

    def split(self, max_tokens: int) -> Advance:
        return self

    def run(self, others: Sequence[Advance]) -> list[World]:
        steps = (self, *others)
        return self.model.advance_each([step.world for step in steps], [step.action for step in steps])


@dataclass(frozen=True, eq=False)
class AdvanceRows:
    """Forward of one imagined step of each row, or of the first rows that fit; returns their world."""

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
    def num_tokens(self) -> int:
        return sum(self._tokens)

    def split(self, max_tokens: int) -> AdvanceRows:
        fitting = sum(total <= max_tokens for total in accumulate(self._tokens))
        return self if fitting == len(self.actions) else replace(self, actions=self.actions[: max(fitting, 1)])

    def run(self, others: Sequence[AdvanceRows]) -> list[World]:
        count = len(self.actions)
        world = self.world if count == len(self.world) else self.world.select(range(count))
        return [self.model.advance(world, self.actions)]


def build(engine: Engine, model: WorldModel, log: WorldLog, ids: tuple[int, ...]) -> ForwardGenerator[World]:
    """Build the world of a log. Worlds of one context share its KV cache.

    ids: tokens of the context.
    """
    key = ids, log.depth
    world: World | None = engine.cache.get(key)
    if world is None:
        loops = log.depth.limit
        state = yield from prefill(engine.runner, engine.cache, ids, loops)
        history = state.share(1)
        slots: PrefillResult = yield PrefillChunk(engine.runner, history, model.slot_ids, loops)
        world = model.start_world(history, (slots.state, slots.latent), log.depth, 0)
        engine.cache.put(key, world)
    for action in log.actions:
        world = yield Advance(model, world, action)
    return world


def advance(
    model: WorldModel, world: World, actions: Sequence[str], fields: Sequence[str], monitor: bool = False
) -> ForwardGenerator[list[Step]]:
    """Imagine actions one after another.

    fields: request field of each action, for error messages.
    monitor: compute summaries.

    Raises:
        PromptTooLongError: the world exceeds the model's context.
    """
    steps = []
    for action, field in zip(actions, fields, strict=True):
        world = yield Advance(model, world, action)
        check_length(model, world, field)
        steps.append(_step(model, world, monitor))
    return steps


@dataclass(frozen=True)
class Planned:
    """End of a path of actions: a row of a world, with the expected reward and continuation of its last step."""

    world: World
    row: int
    reward: float
    continuation: float


def explore(model: WorldModel, world: World, paths: Sequence[Path]) -> ForwardGenerator[dict[Path, Planned]]:
    """Imagine paths of actions from a world of one row, level by level of their prefix tree.

    paths: without duplicates, each after its own prefixes.

    Raises:
        PromptTooLongError: the world exceeds the model's context.
    """
    results: dict[Path, Planned] = {}
    level: list[tuple[World, Sequence[Path]]] = [(world, [()])]
    while level:
        next_level: list[tuple[World, Sequence[Path]]] = []
        for before, ends in level:
            row_of = {path: row for row, path in enumerate(ends)}
            remaining = [path for path in paths if path and path[:-1] in row_of]
            rows = [row_of[path[:-1]] for path in remaining]
            batch = before if rows == list(range(len(before))) or not rows else before.select(rows)
            while remaining:
                after: World = yield AdvanceRows(model, batch, tuple(path[-1] for path in remaining))
                check_length(model, after, "candidates")
                done, remaining = remaining[: len(after)], remaining[len(after) :]
                results |= _planned(model, after, done)
                next_level.append((after, done))
                batch = batch.select(range(len(after), len(batch))) if remaining else batch
        level = next_level
    return results


def _planned(model: WorldModel, world: World, paths: Sequence[Path]) -> dict[Path, Planned]:
    predictions = model.predictions(world)
    rewards, continuations = predictions.expected_reward.tolist(), predictions.continuation.tolist()
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
    """Return the number of tokens of a world."""
    return int(world.state.next_position.max())


def check_length(model: WorldModel, world: World, field: str) -> None:
    length, limit = length_of(world), model.model.config.max_position_embeddings
    if length > limit:
        raise PromptTooLongError(field, length, limit)
