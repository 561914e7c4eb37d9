"""Scheduler of work items: fair between rate-limit keys, within a token budget."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from serve.engine.forward import ForwardBatch, WorkItem

MAX_RETRY_AFTER = 60
"""Largest Retry-After sent to a client, in seconds."""


class Scheduler:
    """Work items in arrival order. The key with the fewest scheduled tokens goes first."""

    def __init__(self) -> None:
        self.items: dict[WorkItem, None] = {}
        self._scheduled_tokens: defaultdict[str, float] = defaultdict(float)

    @property
    def running(self) -> list[WorkItem]:
        return [item for item in self.items if item.started]

    def add(self, item: WorkItem) -> None:
        """Queue an item. A new key starts level with the least-served one, so it cannot starve the others."""
        keys = {other.ctx.key for other in self.items}
        if item.ctx.key not in keys:
            level = min((self._scheduled_tokens[key] for key in keys), default=0.0)
            self._scheduled_tokens[item.ctx.key] = max(self._scheduled_tokens[item.ctx.key], level)
        self.items[item] = None

    def charge(self, keys: Iterable[str], tokens: float = 1.0) -> None:
        for key in keys:
            self._scheduled_tokens[key] += tokens

    def reset(self) -> None:
        """Forget scheduled tokens; called when nothing waits or runs."""
        self._scheduled_tokens.clear()

    def waiting(self, excluded: Collection[WorkItem] = ()) -> list[WorkItem]:
        """Return items that have not started, in scheduling order."""
        return [item for item in self._ordered(excluded) if not item.started]

    def schedule(self, budget: int, excluded: Collection[WorkItem]) -> list[tuple[WorkItem, ForwardBatch]]:
        """Return the next item and those that can share its forward batch.

        budget: most tokens, as far as forwards can be split.
        """
        scheduled: list[tuple[WorkItem, ForwardBatch]] = []
        for item in self._ordered(excluded):
            if item.pending is None:
                continue
            forward = item.pending.split(budget)
            # The first forward runs even if it exceeds the budget and cannot be split: it would never fit.
            if not scheduled or (forward.key == scheduled[0][1].key and forward.num_tokens <= budget):
                scheduled.append((item, forward))
                budget -= forward.num_tokens
            if budget <= 0:
                break
        return scheduled

    def _ordered(self, excluded: Collection[WorkItem]) -> list[WorkItem]:
        # The sort is stable: items of one key keep their arrival order.
        items = (item for item in self.items if item not in excluded)
        return sorted(items, key=lambda item: self._scheduled_tokens[item.ctx.key])

    def pop(self, condition: Callable[[WorkItem], bool]) -> list[WorkItem]:
        """Remove and return the items that fulfil the condition."""
        removed = [item for item in self.items if condition(item)]
        for item in removed:
            self.remove(item)
        return removed

    def remove(self, item: WorkItem) -> None:
        """Remove the item if present."""
        self.items.pop(item, None)


class RetryEstimator:
    """Estimate of Retry-After from the mean time between ends of requests."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._interval = 1.0

    def record_end(self, busy: bool) -> None:
        """Record the end of a request.

        busy: other requests are admitted; idle time does not count.
        """
        now = time.monotonic()
        if busy:
            # Capped, so that one long request does not dominate the moving average.
            self._interval += 0.1 * (min(now - self._last, MAX_RETRY_AFTER) - self._interval)
        self._last = now

    def seconds(self, requests: int) -> int:
        """Return the time until that number of requests will have ended, at least one second."""
        return max(1, min(MAX_RETRY_AFTER, math.ceil(requests * self._interval)))
