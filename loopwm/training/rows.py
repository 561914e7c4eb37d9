"""Which rows a text run sees, in which order: a pure function of the seed, so that a run resumes exactly.

An epoch visits every anchor (a place of an episode) once in a seeded order. Each anchor becomes a row: either a
snapshot of that step, or the episode's beginning followed by the steps around the anchor, as far as a context limit
drawn for the row allows. Pools of rows are sorted by length and cut into micro-batches by a token budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopwm.text.tree import Layout, RowBuilder, RowPlan, TokenEpisode, TreeBatch, TreeRow, block_widths
from loopwm.training.config import BatchConfig, DataConfig, ObjectiveConfig

STEP_MARKS = 3
"""Template tokens of a trunk step: <|act|>, <|obs|>, <|end|>."""

OBSERVATION_MARKS = 2
"""Those of its observation."""

POOL_ORDER = 2**31
"""Keeps the random stream that orders a pool apart from those of epochs."""


class RowPlanner:
    """Draws the plan of one row."""

    def __init__(self, config: DataConfig, objective: ObjectiveConfig, state_slots: int) -> None:
        self.config = config
        self.state_slots = state_slots
        self.supervise_trunk = objective.supervise == "every"
        self.terminal_only = objective.supervise == "terminal"

    def plan(self, episode: TokenEpisode, anchor: int, rng: np.random.Generator) -> RowPlan:
        """A row around step `anchor`, 0 <= anchor < episode.last_step."""
        low, high = math.log(self.config.trunk_tokens_min), math.log(self.config.trunk_tokens_max)
        budget = int(math.exp(rng.uniform(low, high)))
        snapshot = rng.random() < self.config.snapshot_share and episode.looks[anchor] is not None
        head = anchor if snapshot else 0
        room = budget - self._head_length(episode, head, snapshot)
        first, last = self._steps(episode, head, anchor, room, rng)
        fresh = sum(self._step_length(episode, step) for step in range(max(first, head + 1), last + 1))
        branches = self._branches(episode, [head, *range(first, last + 1)], fresh, rng)
        return RowPlan(head, snapshot, first, last, branches, self.supervise_trunk, self.terminal_only)

    def _head_length(self, episode: TokenEpisode, step: int, snapshot: bool) -> int:
        length = len(episode.goal) + len(episode.observations[step]) + STEP_MARKS
        for part in (episode.looks[step], episode.inventories[step]):
            length += len(part) + 1 if snapshot and part is not None else 0
        return length

    def _step_length(self, episode: TokenEpisode, step: int) -> int:
        return len(episode.actions[step]) + len(episode.observations[step]) + STEP_MARKS

    def _steps(
        self, episode: TokenEpisode, head: int, anchor: int, room: int, rng: np.random.Generator
    ) -> tuple[int, int]:
        """First and last trunk step. They end some steps after the anchor and reach back as far as there is room."""
        last = min(anchor + int(rng.integers(0, self.config.row_stride + 1)), episode.last_step)
        if head == anchor:
            return head + 1, self._reach(episode, range(head + 1, last + 1), room)[1]
        first = self._reach(episode, range(last, head, -1), room)[1]
        return (first, last) if first <= last else (head + 1, head)

    def _reach(self, episode: TokenEpisode, steps: range, room: int) -> tuple[int, int]:
        """How many of `steps` fit, and the last one that does (the one before `steps` if none)."""
        count = 0
        for step in steps:
            room -= self._step_length(episode, step)
            if room < 0:
                break
            count += 1
        return count, steps.start + (count - 1) * steps.step

    def _branches(
        self, episode: TokenEpisode, trunk: Sequence[int], fresh: int, rng: np.random.Generator
    ) -> tuple[tuple[int, int], ...]:
        """Branches at random trunk steps until they hold branch_ratio tokens for each fresh trunk token, or are enough.

        The head of a snapshot always gets one: it is the only place where a snapshot stands alone.
        """
        candidates = [step for step in trunk if step < episode.last_step]
        rng.shuffle(candidates)
        if trunk[0] in candidates:
            candidates.remove(trunk[0])
            candidates.insert(0, trunk[0])
        budget = self.config.branch_ratio * fresh
        branches: list[tuple[int, int]] = []
        for step in candidates:
            horizons = min(self.config.max_horizon, episode.last_step - step)
            if branches and (budget <= 0 or len(branches) == self.config.max_branches):
                break
            budget -= self._branch_length(episode, step, horizons)
            branches.append((step, horizons))
        return tuple(branches)

    def _branch_length(self, episode: TokenEpisode, step: int, horizons: int) -> int:
        steps = range(step + 1, step + horizons + 1)
        undecoded = steps[:-1] if self.terminal_only else ()
        length = sum(self._step_length(episode, s) + self.state_slots for s in steps)
        return length - sum(len(episode.observations[s]) + OBSERVATION_MARKS for s in undecoded)


@dataclass(frozen=True)
class Cursor:
    """Where the stream of micro-batches stands: the pool and the micro-batch in it."""

    pool: int = 0
    offset: int = 0


@dataclass(frozen=True)
class PlannedRow:
    """A row as its plan lays it out, and the plan, so that it can be laid out shallower."""

    episode: TokenEpisode
    plan: RowPlan
    row: TreeRow


class BatchStream:
    """The endless stream of global batches; which rows they hold depends only on seed and cursor."""

    def __init__(
        self,
        episodes: Sequence[TokenEpisode],
        planner: RowPlanner,
        builder: RowBuilder,
        batch: BatchConfig,
        seed: int,
        pad_id: int,
        layout: Layout,
    ) -> None:
        self.episodes = episodes
        self.planner = planner
        self.builder = builder
        self.batch = batch
        self.seed = seed
        self.pad_id = pad_id
        self.layout = layout
        self.anchors = [
            (index, step)
            for index, episode in enumerate(episodes)
            for step in range(0, episode.last_step, planner.config.row_stride)
        ]
        if not self.anchors:
            raise ValueError("the shards hold no episode with a step")
        self._cached: tuple[int, list[list[PlannedRow]]] | None = None
        self._epoch_order: tuple[int, NDArray[np.int64]] | None = None

    def global_batches(self, cursor: Cursor, horizons: Iterator[int]) -> Iterator[tuple[list[TreeBatch], Cursor]]:
        """Yields the micro-batches of each optimiser step and the cursor after it.

        `horizons`: the deepest branch of each of these steps. Rows are cut to it; the cursor moves as without.
        """
        for horizon in horizons:
            groups: list[list[PlannedRow]] = []
            while len(groups) < self.batch.micro_batches:
                pool = self._pool(cursor.pool)
                groups.append(pool[cursor.offset])
                done = cursor.offset + 1 == len(pool)
                cursor = Cursor(cursor.pool + 1) if done else Cursor(cursor.pool, cursor.offset + 1)
            yield self._collate(groups, horizon), cursor

    def _collate(self, groups: Sequence[Sequence[PlannedRow]], horizon: int) -> list[TreeBatch]:
        first, batches = 0, []
        for group in groups:
            rows = [self._cut(planned, horizon) for planned in group]
            batches.append(TreeBatch.collate(rows, range(first, first + len(rows)), self.pad_id, self.layout))
            first += len(rows)
        return batches

    def _cut(self, planned: PlannedRow, horizon: int) -> TreeRow:
        plan = planned.plan.cut(horizon)
        return planned.row if plan is planned.plan else self.builder.build(planned.episode, plan)

    def _pool(self, number: int) -> list[list[PlannedRow]]:
        if self._cached is None or self._cached[0] != number:
            rows = [self._row(number * self.batch.length_pool + i) for i in range(self.batch.length_pool)]
            self._cached = (number, self._group(rows, number))
        return self._cached[1]

    def _row(self, index: int) -> PlannedRow:
        epoch, place = divmod(index, len(self.anchors))
        episode_index, step = self.anchors[self._order(epoch)[place]]
        episode = self.episodes[episode_index]
        rng = _generator(self.seed, epoch, place)
        anchor = min(step + int(rng.integers(0, self.planner.config.row_stride)), episode.last_step - 1)
        plan = self.planner.plan(episode, anchor, rng)
        return PlannedRow(episode, plan, self.builder.build(episode, plan))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, _generator(self.seed, epoch).permutation(len(self.anchors)))
        return self._epoch_order[1]

    def _group(self, rows: list[PlannedRow], number: int) -> list[list[PlannedRow]]:
        """Cuts rows of similar length into micro-batches within the budget, in a seeded order."""
        groups: list[list[PlannedRow]] = []
        for row in sorted(rows, key=lambda planned: len(planned.row), reverse=True):
            if groups and self._padded_size([*groups[-1], row]) <= self.batch.tokens:
                groups[-1].append(row)
            else:
                groups.append([row])
        order = _generator(self.seed, POOL_ORDER, number).permutation(len(groups))
        return [groups[i] for i in order]

    def _padded_size(self, group: Sequence[PlannedRow]) -> int:
        """Tokens of a batch of these rows, padding included."""
        return len(group) * int(block_widths([planned.row for planned in group], self.layout).sum())


def horizons(config: ObjectiveConfig, max_horizon: int, step: int) -> Iterator[int]:
    """K of optimiser step `step` and all later ones: min(K_max, 1 + floor(step / Delta)) (LoopWM, curriculum)."""
    while True:
        yield min(max_horizon, 1 + step // config.horizon_every) if config.horizon_every else max_horizon
        step += 1


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
