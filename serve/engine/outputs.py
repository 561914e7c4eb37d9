"""Outputs on their way from the engine's thread to those who listen on event loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class OutputQueue:
    """What is put in it on the engine's thread goes out together: to wake an event loop costs more than to tell it."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """To be called on this loop once all is sent."""
        self._waiting.setdefault(loop, []).append(call)

    def send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for loop, calls in waiting.items():
            with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
