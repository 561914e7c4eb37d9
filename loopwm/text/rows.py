"""Which rows a text run sees, in which order: a pure function of the seed, so that a run resumes exactly.

Episodes of one world and policy are a source. An epoch of a source cuts each of its episodes into windows, one row
each, so that every transition is a target of a trunk exactly once; regimes and deferred horizons are handed out by
quota as the windows are cut. Sources take turns by quota, each in epochs of its own. An optimiser step takes rows until
it has enough rows and tokens, and sorts them by length into micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.shards import TokenEpisode
from loopwm.records.template import RowRegime, StateSlots
from loopwm.text.training_config import BatchConfig, DataConfig, ObjectiveConfig
from loopwm.text.tree import Branch, Layout, RowBuilder, RowPlan, TreeRow
from loopwm.text.tree_batch import TreeBatch, row_widths

STEP_MARKS = 3
"""Template tokens of a trunk step beside its slots: <|act|>, <|obs|>, <|end|>."""

HEAD_MARKS = 2
"""Those of a head's observation."""

Key = TypeVar("Key")
Group = tuple[str, str]
"""World and policy of a source."""


class Quota(Generic[Key]):
    """Something handed out by shares: whoever has least for its share is next."""

    def __init__(self, shares: Mapping[Key, float]) -> None:
        self.shares = {key: share for key, share in shares.items() if share > 0}
        self._given = dict.fromkeys(self.shares, 0.0)

    def give(self, key: Key, amount: float) -> None:
        if key in self.shares:
            self._given[key] += amount

    def served(self, key: Key) -> float:
        """What it was given for each unit of its share."""
        return self._given[key] / self.shares[key]

    def next(self, among: Sequence[Key]) -> Key:
        """Of equals, the first. Raises ValueError for none."""
        return min(among, key=self.served)


class MeasuredEpisode:
    """An episode with the lengths that rows are cut by. ends[i]: tokens of the trunk's steps 1 .. i."""

    def __init__(self, episode: TokenEpisode, slots: StateSlots) -> None:
        self.episode = episode
        self.targets = np.array([len(text) + 1 for text in episode.observations])
        marks = STEP_MARKS + (slots.count if slots.in_trunk else 0)
        steps = np.array([len(text) for text in episode.actions]) + self.targets - 1 + marks
        self.ends = np.concatenate(([0], steps[1:].cumsum()))
        texts = [np.asarray(text).tobytes() for text in episode.actions]
        self._repeats = np.array([a == b for a, b in zip(texts[1:], texts[:-1], strict=True)])

    def head_length(self, step: int, regime: RowRegime) -> int | None:
        """Tokens up to the end of the head's observation; None if it shows what is not recorded."""
        texts = list(self.episode.head(step, regime).values())
        if any(text is None for text in texts):
            return None
        return sum(len(text) + 1 for text in texts if text is not None) + int(self.targets[step]) - 1 + HEAD_MARKS

    def reach(self, step: int, room: int) -> int:
        """The last step so that steps after `step` up to it fit into `room` tokens; `step` itself if none does."""
        return int(np.searchsorted(self.ends, self.ends[step] + room, side="right")) - 1

    def reach_back(self, step: int, room: int) -> int:
        """The first step so that steps from it up to `step` fit into `room` tokens; step + 1 if none does."""
        return int(np.searchsorted(self.ends, self.ends[step] - room, side="left")) + 1

    def repeats(self, step: int, horizon: int) -> bool:
        """Whether two of the `horizon` actions after `step` in a row are equal."""
        return bool(self._repeats[step + 1 : step + horizon].any())


class EpochPlanner:
    """Cuts the episodes of one source into the rows of an epoch."""

    def __init__(
        self, episodes: Sequence[TokenEpisode], config: DataConfig, objective: ObjectiveConfig, slots: StateSlots
    ) -> None:
        self.config = config
        self.supervise = objective.supervise
        self.episodes = [MeasuredEpisode(episode, slots) for episode in episodes]
        self.trunk_is_served = self.supervise == "every" and slots.in_trunk

    @property
    def targets(self) -> int:
        """Target tokens of all transitions."""
        return sum(int(measured.targets[1:].sum()) for measured in self.episodes)

    def offers(self, regime: RowRegime) -> bool:
        """Whether some row can be of this regime."""
        return any(
            self._allowed(measured, step, regime)
            for measured in self.episodes
            for step in range(measured.episode.last_step)
        )

    def plan(self, rng: np.random.Generator) -> list[tuple[int, RowPlan]]:
        """The rows of an epoch in their order: the episode's index and its plan."""
        regimes = Quota(self.config.regimes)
        horizons = Quota(dict(enumerate(self.config.horizon_shares, start=1)))
        rows = [
            (int(index), plan)
            for index in rng.permutation(len(self.episodes))
            for plan in self._rows(self.episodes[index], regimes, horizons, rng)
        ]
        return [rows[i] for i in rng.permutation(len(rows))]

    def _rows(
        self, measured: MeasuredEpisode, regimes: Quota[RowRegime], horizons: Quota[int], rng: np.random.Generator
    ) -> Iterator[RowPlan]:
        """The windows of an episode: each begins after the last step of the one before."""
        start = 0
        while start < measured.episode.last_step:
            allowed = [regime for regime in regimes.shares if self._allowed(measured, start, regime)]
            regime = regimes.next(allowed) if allowed else "observed"
            head, first, last = self._window(measured, start, regime, rng)
            last = self._end_where_due(measured, start, last, regimes)
            targets = int(measured.targets[start + 1 : last + 1].sum())
            if self.trunk_is_served:
                horizons.give(1, targets)
            branches = self._branches(measured, start, last, horizons, rng)
            deferred = sum(int(measured.targets[b.step + k]) for b in branches for k in b.decoded)
            regimes.give(regime, targets + deferred)
            targets_from = start + 1 if self.supervise == "every" else None
            yield RowPlan(head, regime, first, last, branches, targets_from)
            start = last

    def _allowed(self, measured: MeasuredEpisode, start: int, regime: RowRegime) -> bool:
        """Whether what the regime shows is recorded and leaves room for a step."""
        head, before = (0, max(0, start - 1)) if regime in ("observed", "briefed") else (start, start)
        length = measured.head_length(head, regime)
        steps = int(measured.ends[start + 1] - measured.ends[before])
        return length is not None and length + steps <= self.config.trunk_tokens_max

    def _window(
        self, measured: MeasuredEpisode, start: int, regime: RowRegime, rng: np.random.Generator
    ) -> tuple[int, int, int]:
        """The head of a row whose first target is step start + 1, and its first and last trunk step.

        Its trunk's length is drawn log-uniformly; one that opens with a hidden state, which is long, is as long as may
        be, so that many steps share it. A row with a history keeps the episode's first observation and drops the oldest
        steps after it, as contexts over the limit do; the last one before the first target always stays.
        """
        low, high = math.log(self.config.trunk_tokens_min), math.log(self.config.trunk_tokens_max)
        drawn = math.exp(rng.uniform(low, high))
        budget = self.config.trunk_tokens_max if regime in ("briefed", "full") else int(drawn)
        head, first, longest = start, start + 1, start + self.config.snapshot_steps
        if regime in ("observed", "briefed"):
            head, longest = 0, measured.episode.last_step
        room = budget - (measured.head_length(head, regime) or 0)
        if head < start:
            first = min(measured.reach_back(start, int(max(0, room) * self.config.history_share)), start)
            room -= int(measured.ends[start] - measured.ends[first - 1])
        last = min(measured.reach(start, max(0, room)), longest, measured.episode.last_step)
        return head, first, max(last, start + 1)

    def _end_where_due(self, measured: MeasuredEpisode, start: int, last: int, regimes: Quota[RowRegime]) -> int:
        """An earlier end of a window, where the regime that has least can begin, if it can not at `last`."""
        due = regimes.next(list(regimes.shares))
        if last == measured.episode.last_step or self._allowed(measured, last, due):
            return last
        return next((step for step in range(last - 1, start, -1) if self._allowed(measured, step, due)), last)

    def _branches(
        self, measured: MeasuredEpisode, start: int, last: int, horizons: Quota[int], rng: np.random.Generator
    ) -> tuple[Branch, ...]:
        """Branches at random steps of a window, more likely before runs of equal actions, until none is due."""
        branches: list[Branch] = []
        for step in self._places(measured, start, last, rng):
            if len(branches) == self.config.max_branches:
                break
            reach = min(self.config.max_horizon, measured.episode.last_step - step)
            if decoded := self._decoded(horizons, reach):
                branches.append(Branch(step, decoded))
                for k in decoded:
                    horizons.give(k, int(measured.targets[step + k]))
        return tuple(branches)

    def _places(self, measured: MeasuredEpisode, start: int, last: int, rng: np.random.Generator) -> list[int]:
        """Steps of a window in the order of a weighted draw (Efraimidis and Spirakis: keys u^(1 / weight))."""
        steps = range(start, min(last, measured.episode.last_step - 1) + 1)
        repeats = [measured.repeats(step, self.config.max_horizon) for step in steps]
        weights = np.where(repeats, self.config.repeat_weight, 1.0)
        order = np.argsort(-(rng.random(len(steps)) ** (1 / weights)), kind="stable")
        return [steps[i] for i in order]

    def _decoded(self, horizons: Quota[int], reach: int) -> tuple[int, ...]:
        """The horizons to decode of a branch that can be `reach` deep; none if it is not needed.

        A trunk with slots is what horizon 1 is served as, so that branches hold deeper ones alone, as many as are due.
        `supervise: terminal` decodes the deepest alone (LoopWM, equation 19).
        """
        known = [k for k in horizons.shares if k <= reach]
        if self.trunk_is_served:
            return tuple(k for k in known if k > 1 and horizons.served(k) < horizons.served(1))
        if self.supervise == "terminal" and known:
            return (horizons.next(known),)
        return tuple(known)


@dataclass(frozen=True)
class PlannedRow:
    """A row as its plan lays it out, and the plan, so that it can be laid out shallower."""

    episode: TokenEpisode
    plan: RowPlan
    row: TreeRow


@dataclass(frozen=True)
class Place:
    """Where a source stands: its epoch, the next row in it, and the target tokens it has given so far."""

    epoch: int = 0
    row: int = 0
    targets: int = 0


@dataclass(frozen=True)
class Cursor:
    """Where the stream stands: the fields of each source's `Place`, by its name. Absent sources stand at the start."""

    places: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Source:
    """The endless rows of the episodes of one world and policy. share: of the target tokens of all sources."""

    def __init__(
        self, name: str, share: float, planner: EpochPlanner, builder: RowBuilder, seed: tuple[int, int]
    ) -> None:
        self.name = name
        self.share = share
        self.planner = planner
        self._builder = builder
        self._seed = seed
        self._cached: tuple[int, list[tuple[int, RowPlan]]] | None = None

    def epoch(self, number: int) -> list[tuple[int, RowPlan]]:
        """The rows of an epoch: the episode's index and the plan."""
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, self.planner.plan(_generator(*self._seed, number)))
        return self._cached[1]

    def take(self, place: Place) -> tuple[PlannedRow, Place]:
        """The next row and the place after it."""
        rows = self.epoch(place.epoch)
        index, plan = rows[place.row]
        episode = self.planner.episodes[index].episode
        planned = PlannedRow(episode, plan, self._builder.build(episode, plan))
        at_end = place.row + 1 == len(rows)
        epoch, row = (place.epoch + 1, 0) if at_end else (place.epoch, place.row + 1)
        return planned, Place(epoch, row, place.targets + planned.row.targets)


def make_sources(
    episodes: Sequence[TokenEpisode], data: DataConfig, objective: ObjectiveConfig, builder: RowBuilder, seed: int
) -> list[Source]:
    """The sources of these episodes, each with its share.

    Raises InputError if there is no step, for a regime that no step can be shown in, and as `source_shares` does.
    """
    groups: dict[Group, list[TokenEpisode]] = {}
    for episode in episodes:
        if episode.last_step > 0:
            groups.setdefault((episode.env, episode.policy), []).append(episode)
    if not groups:
        raise InputError("data.train: the shards hold no episode with a step")
    planners = {group: EpochPlanner(groups[group], data, objective, builder.slots) for group in sorted(groups)}
    for regime, share in data.regimes.items():
        if share > 0 and not any(planner.offers(regime) for planner in planners.values()):
            raise InputError(f"data.regimes.{regime}: no step of the shards has what it shows and room for a step")
    shares = source_shares({group: planner.targets for group, planner in planners.items()}, data)
    return [
        Source("/".join(group), share, planners[group], builder, (seed, number))
        for number, (group, share) in enumerate(shares.items())
        if share > 0
    ]


def source_shares(targets: Mapping[Group, int], data: DataConfig) -> dict[Group, float]:
    """Shares of the target tokens by world and, within a world, by policy: the configured ones among those there are,
    or as many as there are.

    targets: of each source. Raises InputError for a world or policy without a share where others have one.
    """
    present: dict[str, float] = {}
    for (env, _), count in targets.items():
        present[env] = present.get(env, 0.0) + count
    envs = _configured("data.envs", present, data.envs)
    shares: dict[Group, float] = {}
    for env, share in envs.items():
        inside = {policy: float(count) for (of, policy), count in targets.items() if of == env}
        policies = _configured("data.policies", inside, data.policies)
        total = sum(policies.values())
        shares |= {(env, policy): share * part / total if total else 0.0 for policy, part in policies.items()}
    whole = sum(shares.values())
    if whole <= 0:
        raise InputError("data.envs, data.policies: no share is left for what the shards hold")
    return {group: shares[group] / whole for group in targets}


def _configured(key: str, present: Mapping[str, float], shares: Mapping[Any, float]) -> dict[str, float]:
    """The shares of what is present; by default `present` itself."""
    if not shares:
        return dict(present)
    if missing := sorted(set(present) - set(shares)):
        raise InputError(f"{key}: the shards hold {missing[0]!r}, which has no share; 0 leaves it out")
    return {name: shares[name] for name in present}


def partition(widths_NK: NDArray[np.int64], groups: int) -> list[tuple[int, int]]:
    """Cuts N rows, in their order, into so many groups that the padded tokens of all are fewest: start and end of each.

    widths: columns of each row's blocks; a group is as wide in each block as its widest row. groups: at most N.
    """
    count = len(widths_NK)
    cost = np.full((count, count + 1), np.inf)
    for start in range(count):
        widest = np.maximum.accumulate(widths_NK[start:], axis=0).sum(1)
        cost[start, start + 1 :] = widest * np.arange(1, count - start + 1)
    best, cuts = cost[0], []
    for _ in range(groups - 1):
        totals = best[:count, None] + cost
        cuts.append(totals.argmin(0))
        best = totals.min(0)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return list(itertools.pairwise([0, *reversed(ends)]))


class BatchStream:
    """The endless stream of global batches; which rows they hold depends only on seed and cursor."""

    def __init__(
        self, sources: Sequence[Source], builder: RowBuilder, batch: BatchConfig, pad_id: int, layout: Layout
    ) -> None:
        self.sources = sources
        self.builder = builder
        self.batch = batch
        self.pad_id = pad_id
        self.layout = layout

    def steps(self, cursor: Cursor) -> Iterator[tuple[list[PlannedRow], Cursor]]:
        """Yields the rows of each optimiser step and the cursor after it."""
        places = {source.name: Place(*cursor.places.get(source.name, ())) for source in self.sources}
        while True:
            rows: list[PlannedRow] = []
            while len(rows) < self.batch.rows or sum(len(planned.row) for planned in rows) < self.batch.tokens:
                source = min(self.sources, key=lambda source: places[source.name].targets / source.share)
                planned, places[source.name] = source.take(places[source.name])
                rows.append(planned)
            yield rows, Cursor({name: (p.epoch, p.row, p.targets) for name, p in places.items()})

    def global_batches(self, cursor: Cursor, horizons: Iterator[int]) -> Iterator[tuple[list[TreeBatch], Cursor]]:
        """Yields the micro-batches of each optimiser step and the cursor after it.

        `horizons`: the deepest branch of each of these steps. Rows are cut to it; the cursor moves as without.
        """
        for horizon, (rows, after) in zip(horizons, self.steps(cursor), strict=False):
            yield self.collate(rows, self.batch.micro_batches, horizon), after

    def collate(self, rows: Sequence[PlannedRow], groups: int, horizon: int) -> list[TreeBatch]:
        """So many batches, of rows of similar length, so that little is padded; no branch is deeper than `horizon`."""
        rows = sorted(rows, key=lambda planned: len(planned.row), reverse=True)
        cuts = partition(row_widths([planned.row for planned in rows], self.layout), groups)
        cut = [self._cut(planned, horizon) for planned in rows]
        return [TreeBatch.collate(cut[a:b], range(a, b), self.pad_id, self.layout) for a, b in cuts]

    def _cut(self, planned: PlannedRow, horizon: int) -> TreeRow:
        plan = planned.plan.cut(horizon)
        return planned.row if plan is planned.plan else self.builder.build(planned.episode, plan)


def horizons(config: ObjectiveConfig, max_horizon: int, step: int) -> Iterator[int]:
    """K of optimiser step `step` and all later ones: min(K_max, 1 + floor(step / Delta)) (LoopWM, section
    3.5.4)."""
    while True:
        yield min(max_horizon, 1 + step // config.horizon_every) if config.horizon_every else max_horizon
        step += 1


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
