"""What a key may have: requests and tokens a minute, worlds and their text. Owned by the event loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Rate = Literal["requests", "tokens"]
RATES: tuple[Rate, ...] = ("requests", "tokens")
MINUTE = 60.0


class RateLimitError(RuntimeError):
    """A key has had its requests or tokens for now. retry_after: seconds until there are more."""

    def __init__(self, rate: Rate, limit: int, retry_after: int) -> None:
        super().__init__(f"The key has had its {limit} {rate} a minute; there are more in {retry_after} s")
        self.rate = rate
        self.retry_after = retry_after


@dataclass(frozen=True)
class KeyQuota:
    """requests, tokens: a minute, None for any number. worlds: kept at a time, None for the service's limit.
    bytes: of their text, None for any number."""

    requests: int | None = None
    tokens: int | None = None
    worlds: int | None = None
    bytes: int | None = None


class Bucket:
    """Fills to its limit within a minute. It may be owed to: how many tokens a request takes is known afterwards."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level, self._at = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds(self, level: float) -> int:
        """Until there is so much in it."""
        return max(0, math.ceil((level - self.level) * MINUTE / self.limit))


class RateLimiter:
    """Of all keys, and what is left of them this minute. Keys without one have no limits of their own."""

    def __init__(
        self, quotas: Mapping[str, KeyQuota] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quotas = dict(quotas or {})
        self._clock = clock
        self._buckets: dict[tuple[str, Rate], Bucket] = {}

    def replace(self, quotas: Mapping[str, KeyQuota]) -> None:
        """Others from now on. Whose rate stays has what was left of it."""
        self._quotas = dict(quotas)
        self._buckets = {
            (key, rate): bucket
            for (key, rate), bucket in self._buckets.items()
            if getattr(self.of(key), rate) == bucket.limit
        }

    def of(self, key: str) -> KeyQuota:
        return self._quotas.get(key, KeyQuota())

    def bucket(self, key: str, rate: Rate) -> Bucket | None:
        """None where there is no such limit."""
        limit = getattr(self.of(key), rate)
        if limit is None:
            return None
        return self._buckets.setdefault((key, rate), Bucket(limit, self._clock))

    def check(self, key: str, rate: Rate) -> None:
        """Raises RateLimitError where less than one is left."""
        bucket = self.bucket(key, rate)
        if bucket is not None and bucket.level < 1:
            raise RateLimitError(rate, bucket.limit, max(1, bucket.seconds(1)))

    def charge(self, key: str, rate: Rate, amount: int) -> None:
        bucket = self.bucket(key, rate)
        if bucket is not None:
            bucket.take(amount)
