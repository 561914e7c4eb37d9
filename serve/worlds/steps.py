"""Steps and plans of worlds, as engine work items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from loopwm.core.exit_rules import ExitRule
from loopwm.records import template
from loopwm.text.world import World, WorldModel
from serve.engine.engine import Engine
from serve.engine.forward import PADDING, ForwardGenerator, PrefillChunk, PrefillResult, prefill
from serve.worlds.store import WorldLog

Path = tuple[str, ...]
"""Sequence of actions."""


class PrefixWorld(NamedTuple):
    """World of a remote engine: the tokens that lead to it."""

    ids: tuple[int, ...]
    depth: ExitRule

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def loops(self) -> tuple[tuple[int]]:
        return ((self.depth.limit,),)


class PrefixModel(WorldModel):
    """World model of a remote engine: steps append tokens, which the server reads when it decodes."""

    def start(self, ids: tuple[int, ...], depth: ExitRule) -> PrefixWorld:
        return PrefixWorld(ids if self.slots.in_trunk else (*ids, *self.slot_ids), depth)

    def advance_each(self, worlds: Sequence[Any], actions: Sequence[str]) -> list[Any]:
        steps = zip(worlds, actions, strict=True)
        return [PrefixWorld((*world.ids, *self.action_ids(action)[:-1]), world.depth) for world, action in steps]

    def before_decoding(self, world: Any) -> Any:
        return world.ids


@dataclass(frozen=True)
class Step:
    """Imagined step, before its observation is decoded.

    reward: most likely reward in points; None without prediction heads, like the next three.
    expected_reward: mean reward in points.
    continuation: probability that the episode continues.
    acceptance: probability that the action is carried out.
    summary: g_omega, if requested.
    """

    world: Any
    loops: int
    reward: float | None
    expected_reward: float | None
    continuation: float | None
    acceptance: float | None
    summary: list[float] | None


class Candidate(NamedTuple):
    """Expected rewards in points and continuation probabilities, after each action of a plan."""

    rewards: tuple[float, ...]
    continuations: tuple[float, ...]

    @property
    def score(self) -> float:
        """Expected sum of rewards, each weighted by the probability that the episode has continued until then."""
        alive = accumulate(self.continuations, mul, initial=1.0)
        return sum(reward * weight for reward, weight in zip(self.rewards, alive, strict=False))


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
    """Forward of one imagined step of some rows of a world, or of the first of them that fit; returns their world.

    rows: row that each action follows.
    sizes: tokens of each action.
    """

    model: WorldModel
    world: World
    rows: tuple[int, ...]
    actions: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        return AdvanceRows, id(self)  # its rows are the batch: two plans of one world do not run together

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)

    def split(self, max_tokens: int) -> AdvanceRows:
        count = max(1, sum(total <= max_tokens for total in accumulate(self.sizes)))
        return replace(self, rows=self.rows[:count], actions=self.actions[:count], sizes=self.sizes[:count])

    def run(self, others: Sequence[AdvanceRows]) -> list[World]:
        return [self.model.advance(self.world.select(self.rows), self.actions)]


def build(engine: Engine, model: WorldModel, log: WorldLog, ids: tuple[int, ...]) -> ForwardGenerator[Any]:
    """Build the world of a log. Worlds of one context share its KV cache. ids: tokens of the context."""
    key = ids, log.depth
    world: Any = model.start(*key) if isinstance(model, PrefixModel) else engine.cache.get(key)
    if world is None:
        loops = log.depth.limit
        state = yield from prefill(engine.runner, engine.cache, ids, loops)
        history = state.share(1)
        slots: PrefillResult = yield PrefillChunk(engine.runner, history, model.slot_ids, loops)
        world = model.start_world(history, (slots.state, slots.latent), log.depth)
        engine.cache.put(key, world)
    for action in log.actions:
        world = yield Advance(model, world, action)
    return world


def advance(
    model: WorldModel, world: Any, actions: Sequence[str], monitor: bool = False
) -> ForwardGenerator[list[Step]]:
    """Imagine actions one after another. monitor: compute summaries."""
    steps = []
    for action in actions:
        world = yield Advance(model, world, action)
        steps.append(_step(model, world, monitor))
    return steps


def explore(
    model: WorldModel, world: World, paths: Sequence[Path], sizes: Mapping[str, int]
) -> ForwardGenerator[dict[Path, tuple[float, float]]]:
    """Return the expected reward and continuation after each path of actions from a world of one row.

    paths: without duplicates, each with all its prefixes.
    sizes: tokens of each action.
    """
    outcomes: dict[Path, tuple[float, float]] = {}
    following: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        following[path[:-1]].append(path)
    # Depth first: at most one part of each level is in memory, however many paths there are.
    stack = [(world, [(0, path) for path in following[()]])]
    while stack:
        before, waiting = stack.pop()
        actions = tuple(path[-1] for _, path in waiting)
        rows = tuple(row for row, _ in waiting)
        after: World = yield AdvanceRows(model, before, rows, actions, tuple(sizes[action] for action in actions))
        reached, rest = waiting[: len(after)], waiting[len(after) :]
        predictions = model.predictions(after)
        ends = zip(predictions.expected_reward.tolist(), predictions.continuation.tolist(), strict=True)
        outcomes |= zip((path for _, path in reached), ends, strict=True)
        further = [(row, path) for row, (_, end) in enumerate(reached) for path in following[end]]
        stack += [(one, left) for one, left in ((before, rest), (after, further)) if left]
    return outcomes


def _step(model: WorldModel, world: Any, monitor: bool) -> Step:
    heads: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)
    if model.model.config.prediction_heads and not isinstance(model, PrefixModel):
        p = model.predictions(world)
        heads = (p.reward.item(), p.expected_reward.item(), p.continuation.item(), p.acceptance.item())
    summary = model.monitor(world)[0].tolist() if monitor else None
    return Step(world, world.loops[0][-1], *heads, summary)
