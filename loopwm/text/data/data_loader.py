"""Data loader of text runs: rows and their order are a pure function of the seed, so that a run resumes exactly.

A source is the episodes of one world and policy, and of one task if tasks have shares. An epoch of a source cuts each
of its episodes into windows, one row each, so that every transition is a target of a trunk exactly once; contexts and
deferred horizons are assigned to windows by weighted round robin. So are the sources to rows; each has its own epochs.
An optimiser step takes rows until it has enough rows and tokens, and sorts them by length into micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.template import NEEDED
from loopwm.records.token_episode import TokenEpisode
from loopwm.text.data.collate import PackedBatch, TreeBatch, join, row_widths
from loopwm.text.data.sampler import EpochPlanner, generator
from loopwm.text.data.tree import Layout, RowBuilder, RowPlan, TreeRow
from loopwm.text.training.config import BatchConfig, DataConfig, ObjectiveConfig

Group = tuple[str, str, str]
"""World, policy and task of a source; the task is empty if tasks are not separated."""


RowCost = Callable[[int, TreeRow], float]
"""Cost of a row, given its index in the global batch."""


@dataclass(frozen=True)
class PlannedRow:
    """A row before it is built: its plan and what it will hold. Planning costs a fraction of building."""

    episode: TokenEpisode
    plan: RowPlan
    builder: RowBuilder
    tokens: int
    targets: int

    @cached_property
    def row(self) -> TreeRow:
        return self.builder.build(self.episode, self.plan)

    def cut(self, horizon: int) -> TreeRow:
        """Build the row with branches of at most `horizon` actions."""
        plan = self.plan.cut(horizon)
        return self.row if plan is self.plan else self.builder.build(self.episode, plan)


@dataclass(frozen=True)
class SourcePosition:
    """Position in a source: its epoch, the next row in it, and the target tokens emitted so far."""

    epoch: int = 0
    row: int = 0
    targets: int = 0


@dataclass(frozen=True)
class LoaderState:
    """Position of the stream: the fields of each source's `SourcePosition`, by its name. Default: the start."""

    places: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Source:
    """Endless rows of the episodes of a group. share: of the target tokens of all sources."""

    def __init__(
        self, name: str, share: float, planner: EpochPlanner, builder: RowBuilder, seed: tuple[int, int]
    ) -> None:
        self.name = name
        self.share = share
        self.planner = planner
        self._builder = builder
        self._seed = seed
        self._next: SourcePosition | None = None
        """Epoch and row that `_rows` yields next; None before the first."""
        self._rows: Iterator[tuple[int, RowPlan]] = iter(())

    def epoch(self, number: int) -> Iterator[tuple[int, RowPlan]]:
        """Yield the rows of an epoch: index of the episode and plan."""
        return self.planner.plan(generator(*self._seed, number))

    def _row(self, place: SourcePosition) -> tuple[int, RowPlan] | None:
        """Return a row, None behind the last one of its epoch. Rows are mostly taken one after another."""
        if self._next is None or place.epoch != self._next.epoch or place.row < self._next.row:
            self._next, self._rows = SourcePosition(place.epoch), self.epoch(place.epoch)
        skipped = place.row - self._next.row
        self._next = replace(self._next, row=place.row + 1)
        return next(itertools.islice(self._rows, skipped, None), None)

    def take(self, place: SourcePosition) -> tuple[PlannedRow, SourcePosition]:
        """Return the next row and the position after it."""
        while (row := self._row(place)) is None:  # an epoch of few episodes with weights below 1 may be empty
            place = replace(place, epoch=place.epoch + 1, row=0)
        index, plan = row
        measured = self.planner.episodes[index]
        planned = PlannedRow(measured.episode, plan, self._builder, *measured.size(plan))
        return planned, SourcePosition(place.epoch, place.row + 1, place.targets + planned.targets)


def make_sources(
    episodes: Sequence[TokenEpisode],
    data: DataConfig,
    objective: ObjectiveConfig,
    builder: RowBuilder,
    trunk_is_served: bool,
    seed: int,
) -> list[Source]:
    """Build the sources of these episodes, each with its share.

    trunk_is_served: see `LoopWMConfig.trunk_is_served`.

    Raises InputError for no step, a context that no step can be shown in, or as `source_shares`.
    """
    groups: dict[Group, list[TokenEpisode]] = {}
    for episode in episodes:
        if episode.last_step > 0:  # others have no transition to learn
            task = episode.task if episode.env in data.tasks else ""
            groups.setdefault((episode.env, episode.policy, task), []).append(episode)
    if not groups:
        raise InputError("data.train, data.dev: must each contain an episode with a step, got none")
    planners = {
        group: EpochPlanner(groups[group], data, objective, builder.slots, trunk_is_served) for group in sorted(groups)
    }
    for context_kind, share in data.regimes.items():
        if share > 0 and not any(planner.offers(context_kind) for planner in planners.values()):
            raise InputError(
                f"data.regimes.{context_kind}: must be 0, no step of the shards has "
                f"{' and '.join(NEEDED[context_kind]) or 'an observation'} within data.trunk_tokens_max"
            )
    shares = source_shares({group: planner.targets for group, planner in planners.items()}, data)
    return [
        Source("/".join(filter(None, group)), share, planners[group], builder, (seed, number))
        for number, (group, share) in enumerate(shares.items())  # groups are sorted, so seeds do not depend on files
        if share > 0
    ]


def source_shares(targets: Mapping[Group, float], data: DataConfig) -> dict[Group, float]:
    """Compute shares of the target tokens by world, within a world by policy, within a policy by task.

    Configured shares are normalised over the groups present; without any, they follow the target tokens. A policy
    without a task that has a share has none.

    Raises InputError for a world or policy without a share while others have one.
    """
    shares: dict[Group, float] = {}
    present = {
        (env, policy, task): count
        for (env, policy, task), count in targets.items()
        if env not in data.tasks or data.tasks[env].get(task, 0.0) > 0
    }
    if not present:
        raise InputError("data.tasks: must give a share to a task in the shards of data.train and of data.dev")
    for env, share in _normalised(_configured("data.envs", _counted(present, 0), data.envs)).items():
        inside = {group: count for group, count in present.items() if group[0] == env}
        for policy, part in _normalised(_configured("data.policies", _counted(inside, 1), data.policies)).items():
            counts = {task: float(count) for (_, of, task), count in inside.items() if of == policy}
            known = data.tasks.get(env, counts)
            tasks = _normalised({task: known.get(task, 0.0) for task in counts})
            shares |= {(env, policy, task): share * part * of_task for task, of_task in tasks.items()}
    whole = sum(shares.values())
    if whole <= 0:
        raise InputError("data.envs, data.policies, data.tasks: must give a share to a source in the shards")
    return {group: shares.get(group, 0.0) / whole for group in targets}


def _counted(targets: Mapping[Group, float], part: int) -> dict[str, float]:
    """Sum target tokens by one part of the groups."""
    counts: dict[str, float] = {}
    for group, count in targets.items():
        counts[group[part]] = counts.get(group[part], 0.0) + count
    return counts


def _normalised(shares: Mapping[str, float]) -> dict[str, float]:
    """Scale to sum 1; all zeros stay."""
    whole = sum(shares.values())
    return {name: share / whole if whole else 0.0 for name, share in shares.items()}


def _configured(key: str, present: Mapping[str, float], shares: Mapping[Any, float]) -> dict[str, float]:
    """Select the shares of present names; by default `present` itself."""
    if not shares:
        return dict(present)
    if missing := sorted(set(present) - set(shares)):
        raise InputError(f"{key}: must have a share for {missing[0]!r}, which the shards contain; 0 leaves it out")
    return {name: shares[name] for name in present}


def partition(widths_NK: NDArray[np.int64], groups: int) -> list[tuple[int, int]]:
    """Split N rows, in their order, into groups with the fewest padded tokens in all; return start and end of each.

    Args:
        widths_NK: columns of each row's blocks; a group is as wide in each block as its widest row.
        groups: number of groups, at most N.
    """
    count = len(widths_NK)
    cost = np.full((count, count + 1), np.inf)  # [a, b]: padded tokens of rows a .. b - 1 as one group
    for start in range(count):
        widest = np.maximum.accumulate(widths_NK[start:], axis=0).sum(1)  # by the group's end
        cost[start, start + 1 :] = widest * np.arange(1, count - start + 1)
    best, cuts = cost[0], []
    for _ in range(groups - 1):
        totals = best[:count, None] + cost  # best of the groups before, by where they end
        cuts.append(totals.argmin(0))  # start of the last group, by its end
        best = totals.min(0)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return list(itertools.pairwise([0, *reversed(ends)]))


def deal(costs: Sequence[float], hands: int, least: int) -> list[list[int]]:
    """Deal rows to `hands`, the costliest first, each to the hand that costs least so far (Graham, 1969: LPT).

    least: rows that each hand gets at least; there must be enough.

    Returns:
        The indices of each hand's rows, ascending.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    totals = [0.0] * hands
    order = sorted(range(len(costs)), key=lambda row: -costs[row])  # stable: equal costs keep their order
    for position, row in enumerate(order):
        short = [hand for hand in range(hands) if len(dealt[hand]) < least]
        due = sum(least - len(dealt[hand]) for hand in short)
        hand = min(short if len(order) - position <= due else range(hands), key=totals.__getitem__)
        dealt[hand].append(row)
        totals[hand] += costs[row]
    return [sorted(hand) for hand in dealt]


@dataclass(frozen=True)
class BatchStream:
    """Endless stream of global batches; its rows depend only on seed and loader state."""

    sources: Sequence[Source]
    builder: RowBuilder
    batch: BatchConfig
    pad_id: int
    layout: Layout

    def steps(self, loader_state: LoaderState) -> Iterator[tuple[list[PlannedRow], LoaderState]]:
        """Yield the rows of each optimiser step and the loader state after it."""
        places = {source.name: SourcePosition(*loader_state.places.get(source.name, ())) for source in self.sources}
        while True:
            rows: list[PlannedRow] = []
            while len(rows) < self.batch.rows or sum(planned.tokens for planned in rows) < self.batch.tokens:
                source = min(self.sources, key=lambda source: places[source.name].targets / source.share)
                planned, places[source.name] = source.take(places[source.name])
                rows.append(planned)
            yield rows, LoaderState({name: (p.epoch, p.row, p.targets) for name, p in places.items()})

    def global_batches(
        self,
        loader_state: LoaderState,
        horizons: Iterable[int],
        costs: Iterable[RowCost],
        processes: int = 1,
        worker: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[list[TreeBatch], LoaderState]]:
        """Yield the micro-batches of each optimiser step and the loader state after it.

        Args:
            loader_state: start.
            horizons: deepest branch of each of these steps. Rows are cut to it; the loader state advances as without.
            costs: costs of the rows of each step.
            processes: as in `collate`.
            worker: index and number of the processes that share the building: each yields every n-th step.
        """
        steps = zip(horizons, costs, self.steps(loader_state), strict=False)
        for horizon, cost, (rows, after) in itertools.islice(steps, worker[0], None, worker[1]):
            yield self.collate(rows, self.batch.micro_batches, horizon, cost, processes), after

    def collate(
        self, rows: Sequence[PlannedRow], groups: int, horizon: int, cost: RowCost | None = None, processes: int = 1
    ) -> list[TreeBatch]:
        """Collate rows to `groups` batches of similar length, to save padding; no branch is deeper than `horizon`.

        Rows are dealt to the processes by their cost, and those of each are cut into an equal number of batches:
        process i has the batches i, i + processes, ..
        """
        rows = sorted(rows, key=lambda planned: planned.tokens, reverse=True)
        cut = [planned.cut(horizon) for planned in rows]
        costs = [cost(i, row) for i, row in enumerate(cut)] if cost else [1.0] * len(cut)
        if self.batch.packed:
            shares = enumerate(deal(costs, processes, 0))
            parts = [self._packed([cut[i] for i in ids], groups // processes, process) for process, ids in shares]
        else:
            # By the lengths of whole rows, so that the curriculum of horizons moves no row to another batch.
            widths = row_widths([planned.row for planned in rows], self.layout)
            dealt = deal(costs, processes, groups // processes)
            parts = [
                [
                    TreeBatch.collate([cut[i] for i in ids[a:b]], ids[a:b], self.pad_id, self.layout)
                    for a, b in partition(widths[ids], groups // processes)
                ]
                for ids in dealt
            ]
        return [batch for batches in zip(*parts, strict=True) for batch in batches]  # interleaved over the processes

    def _packed(self, rows: Sequence[TreeRow], groups: int, process: int) -> list[TreeBatch]:
        """Collate rows, longest first, to `groups` batches of lines about equally full, numbered over all processes."""
        lines = math.ceil(self.batch.tokens / self.batch.micro_batches / self.batch.packed)
        dealt = deal([len(row) for row in rows], groups * lines, 0)
        joined, first = [join([rows[i] for i in line]) for line in dealt], process * len(dealt)
        ids = range(first, first + len(joined))
        return [
            PackedBatch.of_lines(joined[i::groups], ids[i::groups], self.pad_id, self.batch.packed)
            for i in range(groups)
        ]


def horizons(config: ObjectiveConfig, max_horizon: int, step: int) -> Iterator[int]:
    """Yield K = min(K_max, 1 + floor(step / Delta)) of step `step` and all later ones (LoopWM, section 3.5.4)."""
    while True:
        yield min(max_horizon, 1 + step // config.horizon_every) if config.horizon_every else max_horizon
        step += 1
