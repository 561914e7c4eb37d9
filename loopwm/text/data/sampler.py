"""Sampler of a source's epoch: windows, contexts and deferred branches.

Every transition is a target of a trunk once, except in long episodes if `episode_steps` limits them. Contexts and
deferred horizons are assigned by weighted round robin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopwm.records.template import STEP_MARKS, ContextKind, StateSlots
from loopwm.records.token_episode import ACTION, OBSERVATION, TokenEpisode
from loopwm.text.data.tree import Branch, RowPlan
from loopwm.text.training.config import DataConfig, ObjectiveConfig

HEAD_MARKS = 2
"""Marks of a head's observation: <|obs|> and <|end|>."""

PART = 500
"""Episodes whose rows are planned together."""

Key = TypeVar("Key")


class WeightedRoundRobin(Generic[Key]):
    """Weighted round robin: the most under-served key goes next."""

    def __init__(self, shares: Mapping[Key, float]) -> None:
        self.shares = {key: share for key, share in shares.items() if share > 0}
        self._given = dict.fromkeys(self.shares, 0.0)

    def give(self, key: Key, amount: float) -> None:
        if key in self.shares:
            self._given[key] += amount

    def served(self, key: Key) -> float:
        """Return the amount given to a key per unit of its share."""
        return self._given[key] / self.shares[key]

    def next(self, among: Sequence[Key]) -> Key:
        """Return the most under-served key; ties go to the first. Raises ValueError if empty."""
        return min(among, key=self.served)


class MeasuredEpisode:
    """An episode with the lengths that rows are cut by. ends[i]: tokens of the trunk's steps 1 .. i."""

    def __init__(self, episode: TokenEpisode, slots: StateSlots) -> None:
        self.episode = episode
        self.targets = episode.lengths(OBSERVATION) + np.int32(1)  # <|end|> is a target, too
        marks = STEP_MARKS + (slots.count if slots.in_trunk else 0)
        steps = episode.lengths(ACTION) + self.targets + np.int32(marks - 1)
        steps[0] = 0  # the first observation is part of the head
        self.ends = steps.cumsum(dtype=np.int32)
        self._slots = slots.count
        self._action_lengths = episode.lengths(ACTION)
        actions = episode.identities(ACTION)
        self._repeats = actions[1:] == actions[:-1]
        self._equal_before = _equal_before(episode.identities(OBSERVATION).tolist())

    def head_length(self, step: int, context_kind: ContextKind) -> int | None:
        """Return the tokens up to the end of the head's observation; None if a text of the context was not recorded."""
        texts = list(self.episode.head(step, context_kind).values())
        if any(text is None for text in texts):
            return None
        # HEAD_MARKS and the targets both count the <|end|> of the observation.
        return sum(len(text) + 1 for text in texts if text is not None) + int(self.targets[step]) - 1 + HEAD_MARKS

    def reach(self, step: int, room: int) -> int:
        """Return the last step such that the steps after `step` up to it fit into `room` tokens.

        Returns `step` itself if none does.
        """
        return int(np.searchsorted(self.ends, self.ends[step] + room, side="right")) - 1

    def reach_back(self, step: int, room: int) -> int:
        """Return the first step such that steps from it up to `step` fit into `room` tokens; step + 1 if none."""
        return int(np.searchsorted(self.ends, self.ends[step] - room, side="left")) + 1

    def size(self, plan: RowPlan) -> tuple[int, int]:
        """Return the tokens and the target tokens of a plan's row, without building it."""
        tokens = (self.head_length(plan.head, plan.context_kind) or 0) + int(self.ends[plan.last])
        tokens -= int(self.ends[plan.first - 1])
        targets = 0 if plan.targets_from is None else int(self.targets[plan.targets_from : plan.last + 1].sum())
        for branch in plan.branches:
            actions, answers = self._branch_lengths(branch)
            tokens += (1 + len(actions)) * self._slots + len(actions) + sum(actions)  # each opens with its mark
            tokens += sum(answers) + len(answers)
            targets += sum(answers)
        return tokens, targets

    def _branch_lengths(self, branch: Branch) -> tuple[list[int], list[int]]:
        """Return the tokens of a branch's actions, and the target tokens of its decoded texts."""
        steps = range(branch.step + 1, branch.step + branch.deepest + 1)
        actions = [int(self._action_lengths[step]) for step in steps if step < len(self._action_lengths)]
        answers = [int(self.targets[branch.step + k]) for k in branch.decoded if branch.step + k < len(self.targets)]
        if branch.query is not None:
            query, answer = self.episode.query_places(steps[-1] - 1)[branch.query]
            actions = [*actions[: branch.deepest - 1], query[1] - query[0]]
            answers = [*answers[: len(branch.decoded) - 1], answer[1] - answer[0] + 1]
        return actions, answers

    def repeats(self, steps: NDArray[np.int64], horizon: int) -> NDArray[np.bool_]:
        """Return for each step True if two consecutive actions of the `horizon` actions after it are equal."""
        return self._any_after(self._repeats, steps, horizon - 1)

    def echoes(self, steps: NDArray[np.int64], horizon: int) -> NDArray[np.bool_]:
        """Return for each step True if two of the `horizon` observations after it are equal."""
        # The equal observation before it must be one of the `horizon`, too.
        return self._any_after(self._equal_before, steps, horizon, steps)

    @staticmethod
    def _any_after(
        values: NDArray[Any], steps: NDArray[np.int64], count: int, above: NDArray[np.int64] | int = 0
    ) -> NDArray[np.bool_]:
        """Return for each step True if one of the `count` values after it is greater than `above`."""
        later = steps[:, None] + np.arange(1, count + 1)
        known = later < len(values)
        greater = (values[np.where(known, later, 0)] > np.reshape(above, (-1, 1))) & known
        return np.any(greater, axis=1)


def _equal_before(texts: Sequence[int]) -> NDArray[np.int32]:
    """Return the index of the last equal text before each; -1 for none."""
    last: dict[int, int] = {}
    before = np.full(len(texts), -1, dtype=np.int32)
    for i, text in enumerate(texts):
        before[i] = last.get(text, -1)
        last[text] = i
    return before


@dataclass(frozen=True)
class _Epoch:
    """Target tokens that an epoch has given so far by context kind, horizon and kind of answer; its random source."""

    context_kinds: WeightedRoundRobin[ContextKind]
    horizons: WeightedRoundRobin[int]
    queries: WeightedRoundRobin[bool]
    rng: np.random.Generator


class EpochPlanner:
    """Cuts the episodes of one source into the rows of an epoch."""

    def __init__(
        self,
        episodes: Sequence[TokenEpisode],
        config: DataConfig,
        objective: ObjectiveConfig,
        slots: StateSlots,
        trunk_is_served: bool,
    ) -> None:
        """Measure the episodes. trunk_is_served: as in `LoopWMConfig`; matters if trunks are supervised."""
        self.config = config
        self.supervise = objective.supervise
        self.episodes = [MeasuredEpisode(episode, slots) for episode in episodes]
        self.trunk_is_served = self.supervise == "every" and trunk_is_served  # else trunks train no horizon
        self._weights = np.array([episode.weight for episode in episodes])

    @property
    def targets(self) -> float:
        """Return the mean number of target tokens of an epoch's transitions."""
        return sum(m.episode.weight * int(m.targets[1:].sum()) for m in self.episodes)

    def offers(self, context_kind: ContextKind) -> bool:
        """Return True if a row can have this context."""
        return any(
            self._allowed(measured, step, context_kind)
            for measured in self.episodes
            for step in range(measured.episode.last_step)
        )

    def plan(self, rng: np.random.Generator) -> Iterator[tuple[int, RowPlan]]:
        """Yield the rows of an epoch in order: index of the episode and plan.

        Rows are planned and shuffled `PART` episodes at a time: a step does not wait for the plan of a whole epoch.
        """
        share = self.config.query_share
        queries = WeightedRoundRobin({True: share, False: 1 - share})
        horizons = WeightedRoundRobin(dict(enumerate(self.config.horizon_shares, start=1)))
        epoch = _Epoch(WeightedRoundRobin(self.config.regimes), horizons, queries, rng)
        order = self._sample_episodes(rng)
        for start in range(0, len(order), PART):
            rows = [
                (int(index), plan)
                for index in order[start : start + PART]
                for plan in self._subsample_windows(self.episodes[index], epoch)
            ]
            yield from (rows[i] for i in rng.permutation(len(rows)))

    def _sample_episodes(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw the episodes of an epoch, by index: each `weight` times, a fractional part at random."""
        times = self._weights.astype(np.int64)
        fractions = self._weights - times
        if fractions.any():  # whole weights draw nothing
            times += rng.random(len(times)) < fractions
        return rng.permutation(np.repeat(np.arange(len(times)), times))

    def _subsample_windows(self, measured: MeasuredEpisode, epoch: _Epoch) -> list[RowPlan]:
        """Draw windows of an episode until they contain `episode_steps` steps; all if it has no more."""
        rows, most = list(self._windows(measured, epoch)), self.config.episode_steps
        if not most or measured.episode.last_step <= most:
            return rows
        order = epoch.rng.permutation(len(rows))
        new = np.diff([0, *(row.last for row in rows)])  # steps: each window begins after the one before
        steps = np.cumsum(new[order])
        return [rows[i] for i in order[: int(np.searchsorted(steps, most)) + 1]]

    def _windows(self, measured: MeasuredEpisode, epoch: _Epoch) -> Iterator[RowPlan]:
        """Cut an episode into windows; each begins after the last step of the one before."""
        start = 0
        while start < measured.episode.last_step:
            allowed = [kind for kind in epoch.context_kinds.shares if self._allowed(measured, start, kind)]
            # Without room for any, `_window` takes a step.
            context_kind = epoch.context_kinds.next(allowed) if allowed else "observed"
            head, first, last = self._window(measured, start, context_kind, epoch.rng)
            last = self._shorten_for_due_context(measured, start, last, epoch.context_kinds)
            targets_from = start + 1 if self.supervise == "every" else None
            targets = int(measured.targets[targets_from : last + 1].sum()) if targets_from is not None else 0
            if self.trunk_is_served:
                epoch.horizons.give(1, targets)
            branches = self._branches(measured, start, last, epoch)
            deferred = sum(int(measured.targets[b.step + k]) for b in branches for k in b.decoded)
            epoch.queries.give(False, targets + deferred)
            query_branches, answers = self._query_branches(measured.episode, start, last, epoch)
            epoch.context_kinds.give(context_kind, targets + deferred + answers)
            yield RowPlan(head, context_kind, first, last, branches + query_branches, targets_from)
            start = last

    def _allowed(self, measured: MeasuredEpisode, start: int, context_kind: ContextKind) -> bool:
        """Return True if the texts of the context are recorded and leave room for a step."""
        # A row with a history keeps the last step of it, however long.
        head, before = (0, max(0, start - 1)) if context_kind in ("observed", "briefed") else (start, start)
        length = measured.head_length(head, context_kind)
        steps = int(measured.ends[start + 1] - measured.ends[before])
        return length is not None and length + steps <= self.config.trunk_tokens_max

    def _window(
        self, measured: MeasuredEpisode, start: int, context_kind: ContextKind, rng: np.random.Generator
    ) -> tuple[int, int, int]:
        """Return the head of a row whose first target is step start + 1, and its first and last trunk step.

        The trunk's length is drawn log-uniformly, except after a hidden state: that is long, so the trunk is as long as
        allowed and many steps share it. A row with a history keeps the episode's first observation and drops the oldest
        steps after it, as contexts over the limit do; the last step before the first target always stays.
        """
        low, high = math.log(self.config.trunk_tokens_min), math.log(self.config.trunk_tokens_max)
        length = math.exp(rng.uniform(low, high))
        budget = self.config.trunk_tokens_max if context_kind in ("briefed", "full") else int(length)
        head, first, longest = start, start + 1, start + self.config.snapshot_steps
        if context_kind in ("observed", "briefed"):
            head, longest = 0, measured.episode.last_step
        room = budget - (measured.head_length(head, context_kind) or 0)
        if head < start:
            first = min(measured.reach_back(start, int(max(0, room) * self.config.history_share)), start)
            room -= int(measured.ends[start] - measured.ends[first - 1])
        last = min(measured.reach(start, max(0, room)), longest, measured.episode.last_step)
        return head, first, max(last, start + 1)

    def _shorten_for_due_context(
        self, measured: MeasuredEpisode, start: int, last: int, context_kinds: WeightedRoundRobin[ContextKind]
    ) -> int:
        """Return the latest end up to `last` where the most under-served context can begin; `last` if none."""
        due = context_kinds.next(list(context_kinds.shares))  # also if it cannot begin here
        if last == measured.episode.last_step or self._allowed(measured, last, due):
            return last
        return next((step for step in range(last - 1, start, -1) if self._allowed(measured, step, due)), last)

    def _branches(self, measured: MeasuredEpisode, start: int, last: int, epoch: _Epoch) -> tuple[Branch, ...]:
        """Draw branches at steps of a window, more likely before runs of equal actions, until none is due."""
        branches: list[Branch] = []
        for step in self._branch_steps(measured, start, last, epoch.rng):
            if len(branches) == self.config.max_branches:
                break
            reach = min(self.config.max_horizon, measured.episode.last_step - step)
            if decoded := self._due_horizons(epoch.horizons, reach):
                branches.append(Branch(step, decoded))
                for k in decoded:
                    epoch.horizons.give(k, int(measured.targets[step + k]))
        return tuple(branches)

    def _branch_steps(self, measured: MeasuredEpisode, start: int, last: int, rng: np.random.Generator) -> list[int]:
        """Order the steps of a window by a weighted draw (Efraimidis and Spirakis: keys u^(1 / weight))."""
        steps = np.arange(start, min(last, measured.episode.last_step - 1) + 1)
        horizon, echo = self.config.max_horizon, self.config.echo_weights.get(measured.episode.env, 1.0)
        weights = np.where(measured.repeats(steps, horizon), self.config.repeat_weight, 1.0)
        weights *= np.where(measured.echoes(steps, horizon), echo, 1.0)
        order = np.argsort(-(rng.random(len(steps)) ** (1 / weights)), kind="stable")  # the largest keys come first
        order_of_steps: list[int] = steps[order].tolist()
        return order_of_steps

    def _query_branches(
        self, episode: TokenEpisode, start: int, last: int, epoch: _Epoch
    ) -> tuple[tuple[Branch, ...], int]:
        """Draw state queries at steps of a window until none is due; return them and their target tokens.

        Each follows 0 to K_max - 1 deferred actions, so that the deferred latent must encode the state after them.
        """
        branches: list[Branch] = []
        tokens = 0
        if self.config.query_share > 0:
            for step, index, length in self._sample_queries(episode, start, last, epoch.rng):
                if len(branches) == self.config.max_queries or epoch.queries.next((False, True)) is False:
                    break
                depth = int(epoch.rng.integers(0, min(self.config.max_horizon - 1, step - start) + 1))
                branches.append(Branch(step - depth, (depth + 1,), index))  # leaves within the window
                epoch.queries.give(True, length)
                tokens += length
        return tuple(branches), tokens

    def _sample_queries(
        self, episode: TokenEpisode, start: int, last: int, rng: np.random.Generator
    ) -> list[tuple[int, int, int]]:
        """List (step, index of the query, target tokens) in the order of a weighted draw, as `_branch_steps` does."""
        candidates, weights = [], []
        before, *after = episode.answers(range(max(start - 1, 0), last + 1))
        for step, answers in enumerate(after if start else [before, *after], start=start):
            for index, (action, answer) in enumerate(answers.items()):
                candidates.append((step, index, answer[1] - answer[0] + 1))
                weights.append(1.0 if before.get(action) == answer else self.config.change_weight)
            before = answers
        order = np.argsort(-(rng.random(len(candidates)) ** (1 / np.array(weights))), kind="stable")
        return [candidates[i] for i in order]

    def _due_horizons(self, horizons: WeightedRoundRobin[int], reach: int) -> tuple[int, ...]:
        """Return the horizons to decode of a branch that can be `reach` deep; none if the branch is not needed.

        Trunk steps with slots train horizon 1 as it is served, so branches decode only deeper horizons, all that are
        behind their share. `supervise: terminal` decodes the deepest only (LoopWM, equation 19).
        """
        known = [k for k in horizons.shares if k <= reach]
        if self.trunk_is_served:
            return tuple(k for k in known if k > 1 and horizons.served(k) < horizons.served(1))
        if self.supervise == "terminal" and known:
            return (horizons.next(known),)
        return tuple(known)


def generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
