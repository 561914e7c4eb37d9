"""Per-key rate limits and quotas. Owned by the event loop."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Rate = Literal["requests", "tokens"]
RATES: tuple[Rate, ...] = ("requests", "tokens")
MINUTE = 60.0


class RateLimitError(RuntimeError):
    """A limit of the key is exhausted. rate: name of the limit. retry_after: seconds until there is room."""

    def __init__(self, message: str, rate: str, retry_after: int) -> None:
        super().__init__(message)
        self.rate = rate
        self.retry_after = retry_after


@dataclass(frozen=True)
class KeyQuota:
    """Limits of one key; None for no limit.

    requests, tokens: per minute.
    concurrent: requests at a time.
    worlds: open world sessions; None for the service's limit.
    bytes: text of all its worlds.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    worlds: int | None = None
    bytes: int | None = None


UNLIMITED = KeyQuota()


class Bucket:
    """Token bucket that fills in a minute. May go negative: tokens of a request are known only afterwards."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level, self._updated = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._updated) * self.limit / MINUTE)
        self._updated = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds(self, level: float) -> int:
        """Return the seconds until the bucket holds `level`."""
        return max(0, math.ceil((level - self.level) * MINUTE / self.limit))


class RateLimiter:
    """Per-key rate limits. Keys without a quota are unlimited."""

    def __init__(
        self, quotas: Mapping[str, KeyQuota] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quotas = dict(quotas or {})
        self._clock = clock
        self._buckets: dict[tuple[str, Rate], Bucket] = {}
        self.used: Counter[tuple[str, Rate]] = Counter()
        """What was charged to each key since the start."""

    def replace(self, quotas: Mapping[str, KeyQuota]) -> None:
        """Replace all quotas; a bucket whose limit is unchanged keeps its level."""
        self._quotas = dict(quotas)
        self._buckets = {
            (key, rate): bucket
            for (key, rate), bucket in self._buckets.items()
            if getattr(self.quota(key), rate) == bucket.limit
        }

    def quota(self, key: str) -> KeyQuota:
        return self._quotas.get(key, UNLIMITED)

    def bucket(self, key: str, rate: Rate) -> Bucket | None:
        """Return the bucket, or None if unlimited."""
        limit = getattr(self.quota(key), rate)
        if limit is None:
            return None
        return self._buckets.setdefault((key, rate), Bucket(limit, self._clock))

    def check(self, key: str, rate: Rate) -> None:
        """Raise RateLimitError if less than one is left."""
        bucket = self.bucket(key, rate)
        if bucket is not None and bucket.level < 1:
            seconds = max(1, bucket.seconds(1))
            message = f"rate limit of {bucket.limit} {rate} per minute exceeded; retry in {seconds} s"
            raise RateLimitError(message, rate, seconds)

    def charge(self, key: str, rate: Rate, amount: int) -> None:
        self.used[key, rate] += amount
        bucket = self.bucket(key, rate)
        if bucket is not None:
            bucket.take(amount)
