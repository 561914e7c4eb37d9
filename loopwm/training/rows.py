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

from loopwm.text.tree import RowBuilder, RowPlan, TokenEpisode, TreeBatch, TreeRow
from loopwm.training.config import BatchConfig, DataConfig

STEP_MARKS = 3
"""Template tokens of a trunk step: <|act|>, <|obs|>, <|end|>."""


POOL_ORDER = 2**31
"""Keeps the random stream that orders a pool apart from those of epochs."""


class RowPlanner:
    """Draws the plan of one row."""

    def __init__(self, config: DataConfig, state_slots: int) -> None:
        self.config = config
        self.state_slots = state_slots

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
        return RowPlan(head, snapshot, first, last, branches, self.config.supervise_trunk)

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
            budget -= sum(self._step_length(episode, step + k) + self.state_slots for k in range(1, horizons + 1))
            branches.append((step, horizons))
        return tuple(branches)


@dataclass(frozen=True)
class Cursor:
    """Where the stream of micro-batches stands: the pool and the micro-batch in it."""

    pool: int = 0
    offset: int = 0


class BatchStream:
    """The endless stream of global batches; batch contents depend only on seed and cursor."""

    def __init__(
        self,
        episodes: Sequence[TokenEpisode],
        planner: RowPlanner,
        builder: RowBuilder,
        batch: BatchConfig,
        seed: int,
        pad_id: int,
    ) -> None:
        self.episodes = episodes
        self.planner = planner
        self.builder = builder
        self.batch = batch
        self.seed = seed
        self.pad_id = pad_id
        self.anchors = [
            (index, step)
            for index, episode in enumerate(episodes)
            for step in range(0, episode.last_step, planner.config.row_stride)
        ]
        if not self.anchors:
            raise ValueError("the shards hold no episode with a step")
        self._cached: tuple[int, list[list[TreeRow]]] | None = None
        self._epoch_order: tuple[int, NDArray[np.int64]] | None = None

    def global_batches(self, cursor: Cursor) -> Iterator[tuple[list[TreeBatch], Cursor]]:
        """Yields the micro-batches of each optimiser step and the cursor after it."""
        while True:
            groups: list[list[TreeRow]] = []
            while len(groups) < self.batch.micro_batches:
                pool = self._pool(cursor.pool)
                groups.append(pool[cursor.offset])
                done = cursor.offset + 1 == len(pool)
                cursor = Cursor(cursor.pool + 1) if done else Cursor(cursor.pool, cursor.offset + 1)
            yield self._collate(groups), cursor

    def _collate(self, groups: Sequence[Sequence[TreeRow]]) -> list[TreeBatch]:
        first, batches = 0, []
        for rows in groups:
            batches.append(TreeBatch.collate(rows, range(first, first + len(rows)), self.pad_id))
            first += len(rows)
        return batches

    def _pool(self, number: int) -> list[list[TreeRow]]:
        if self._cached is None or self._cached[0] != number:
            rows = [self._row(number * self.batch.length_pool + i) for i in range(self.batch.length_pool)]
            self._cached = (number, self._group(rows, number))
        return self._cached[1]

    def _row(self, index: int) -> TreeRow:
        epoch, place = divmod(index, len(self.anchors))
        episode_index, step = self.anchors[self._order(epoch)[place]]
        episode = self.episodes[episode_index]
        rng = _generator(self.seed, epoch, place)
        anchor = min(step + int(rng.integers(0, self.planner.config.row_stride)), episode.last_step - 1)
        return self.builder.build(episode, self.planner.plan(episode, anchor, rng))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, _generator(self.seed, epoch).permutation(len(self.anchors)))
        return self._epoch_order[1]

    def _group(self, rows: list[TreeRow], number: int) -> list[list[TreeRow]]:
        """Cuts rows of similar length into micro-batches within the budget, in a seeded order."""
        groups: list[list[TreeRow]] = []
        for row in sorted(rows, key=len, reverse=True):
            if groups and TreeBatch.padded_size([*groups[-1], row]) <= self.batch.tokens:
                groups[-1].append(row)
            else:
                groups.append([row])
        order = _generator(self.seed, POOL_ORDER, number).permutation(len(groups))
        return [groups[i] for i in order]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
