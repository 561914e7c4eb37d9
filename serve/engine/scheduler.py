"""Scheduler of work items: fair between rate-limit keys, within a token budget."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from serve.engine.forward import ForwardBatch
from serve.engine.requests import WorkItem

ScheduledForward = tuple[WorkItem, ForwardBatch]

DECODED_TOKEN = 6
"""Tokens that a decoded one is charged as: 64 rows decode in the time in which six times as many are prefilled, fewer
rows in that of more (6.7 million parameters, one core)."""

MAX_RETRY_AFTER = 60
"""Largest Retry-After sent to a client, in seconds."""


class Scheduler:
    """Work items in arrival order. The key with the fewest scheduled tokens goes first.

    A key without work earns no credit: when it returns, its tokens are raised to the virtual time, the fewest tokens
    of the keys that had items when the step began (start-time fair queueing, Goyal et al. 1996).

    waiting: items that have not started.
    running: items that have: their forwards share the token budget of a step.
    """

    def __init__(self) -> None:
        self.waiting: dict[WorkItem, None] = {}
        self.running: dict[WorkItem, None] = {}
        self._scheduled_tokens: defaultdict[str, float] = defaultdict(float)
        self._virtual_time = 0.0

    @property
    def items(self) -> list[WorkItem]:
        return [*self.running, *self.waiting]

    def add(self, item: WorkItem, first: bool = False) -> None:
        """Queue an item. first: before the others of its key."""
        key = item.ctx.key
        if key not in self._keys():
            self._scheduled_tokens[key] = max(self._scheduled_tokens[key], self._virtual_time)
        if first:
            self.waiting = {item: None, **self.waiting}
        self.waiting[item] = None

    def start(self, item: WorkItem) -> None:
        del self.waiting[item]
        self.running[item] = None

    def begin_step(self, decoding: Sequence[str]) -> None:
        """Charge a decode step. decoding: keys of all sequences that decode."""
        # Keys that only decode set the time if no other key has work: a new one would start far below them.
        if active := self._keys() or set(decoding):
            fewest = min(self._scheduled_tokens[key] for key in active)
            self._virtual_time = max(self._virtual_time, fewest)
        for key in decoding:
            self.charge(key, DECODED_TOKEN)

    def charge(self, key: str, tokens: int) -> None:
        self._scheduled_tokens[key] += tokens

    def _keys(self) -> set[str]:
        return {item.ctx.key for item in self.items}

    def reset(self) -> None:
        """Forget scheduled tokens; called when nothing waits or runs."""
        self._scheduled_tokens.clear()
        self._virtual_time = 0.0

    def next_is_behind(self, other: str, excluded: Collection[WorkItem]) -> bool:
        """Return True if the item that is scheduled next is of a key that has used no more than another key."""
        ready = (item for item in self.running if item not in excluded and item.pending is not None)
        key = next((item.ctx.key for item in self._ordered(ready)), other)
        return key != other and self.is_behind(key, other)

    def is_behind(self, key: str, other: str) -> bool:
        """Return True if a key has used no more than another one."""
        return self._scheduled_tokens[key] <= self._scheduled_tokens[other]

    def next_waiting(self, most: int) -> list[WorkItem]:
        """Return items to start, in scheduling order."""
        return self._ordered(self.waiting)[:most]

    def schedule(self, max_num_batched_tokens: int, excluded: Collection[WorkItem]) -> list[ScheduledForward]:
        """Return the forward of the next running item and those that can share its batch.

        max_num_batched_tokens: as far as forwards can be split.
        """
        scheduled: list[ScheduledForward] = []
        for item in self._ordered(item for item in self.running if item not in excluded):
            if item.pending is None:
                continue
            forward = item.pending.split(max_num_batched_tokens)
            # The first forward runs even if it exceeds the budget and cannot be split: it would never fit.
            if not scheduled or (forward.key == scheduled[0][1].key and forward.num_tokens <= max_num_batched_tokens):
                scheduled.append((item, forward))
                max_num_batched_tokens -= forward.num_tokens
            if max_num_batched_tokens <= 0:
                break
        return scheduled

    def _ordered(self, items: Iterable[WorkItem]) -> list[WorkItem]:
        # The sort is stable: items of one key keep their arrival order.
        return sorted(items, key=lambda item: self._scheduled_tokens[item.ctx.key])

    def pop(self, condition: Callable[[WorkItem], bool]) -> list[WorkItem]:
        """Remove and return the items that fulfil the condition."""
        removed = [item for item in self.items if condition(item)]
        for item in removed:
            self.remove(item)
        return removed

    def remove(self, item: WorkItem) -> None:
        """Remove the item if present."""
        self.waiting.pop(item, None)
        self.running.pop(item, None)


class RetryEstimator:
    """Estimate of Retry-After from the mean time between ends of requests."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._interval = 1.0

    def record_end(self, busy: bool) -> None:
        """Record the end of a request. busy: other requests are admitted; idle time does not count."""
        now = time.monotonic()
        if busy:
            # Capped, so that one long request does not dominate the moving average.
            self._interval += 0.1 * (min(now - self._last, MAX_RETRY_AFTER) - self._interval)
        self._last = now

    def seconds(self, requests: int) -> int:
        """Return the time until that number of requests will have ended, at least one second."""
        return max(1, min(MAX_RETRY_AFTER, math.ceil(requests * self._interval)))
