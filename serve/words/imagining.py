"""What can be asked of a world, as work for the engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from loopwm.core import SharedState
from loopwm.records import template
from loopwm.text.world import World, WorldModel
from serve.engine.engine import Engine
from serve.engine.passes import PADDING, Appended, Chunk, Steps
from serve.engine.prefill import prefill
from serve.words.prompts import PromptTooLongError
from serve.words.world_log import WorldLog


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


def build(engine: Engine, model: WorldModel, log: WorldLog, ids: tuple[int, ...]) -> Steps[World]:
    """The world of a log. ids: of its context. Worlds of one context share what they have seen."""
    begun = ids, log.depth
    world: World | None = engine.cache.get(begun)
    if world is None:
        loops = log.depth.limit
        state = yield from prefill(engine.forward, engine.cache, ids, loops)
        history = SharedState(state, 1)
        slots: Appended = yield Chunk(engine.forward, history, model.slot_ids, loops)
        world = model.begun(history, (slots.state, slots.latent, slots.loop_state), log.depth, 0)
        engine.cache.put(begun, world)
    for action in log.actions:
        world = yield Advance(model, world, action)
    return world


def advance(
    model: WorldModel, world: World, actions: Sequence[str], fields: Sequence[str], monitor: bool = False
) -> Steps[list[Step]]:
    """fields: of the request, where the actions are from. Raises PromptTooLongError where the world grows too long,
    ValueError for a summary the checkpoint cannot give."""
    steps = []
    for action, field in zip(actions, fields, strict=True):
        world = yield Advance(model, world, action)
        check_length(model, world, field)
        steps.append(_step(model, world, monitor))
    return steps


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
