"""Throughput of a run by wall clock, including batch building, evaluation and saving."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throughput:
    """Tokens and FLOPs of the optimiser steps since the last log, over the time since then."""

    def __init__(self, roof: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            roof: FLOPs a second of the matrix products of all processes.
            clock: seconds.
        """
        self._roof = roof
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._since = self._clock()
        self._tokens = self._flops = 0.0

    def add(self, tokens: float, flops: float | None) -> dict[str, float]:
        """Count a step and return the rates to log.

        These are tokens_per_s and, where FLOPs are known, flops_per_token and roof_share, the share of the
        roof that they reach.
        """
        self._tokens += tokens
        seconds = self._clock() - self._since
        rates = {"tokens_per_s": self._tokens / seconds}
        if flops is not None:
            self._flops += flops
            rates["flops_per_token"] = self._flops / self._tokens
            rates["roof_share"] = self._flops / seconds / self._roof
        return rates
