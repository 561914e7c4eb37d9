"""Answers that come in parts, as server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serve.http import errors

Json = dict[str, Any]

log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """One event for each object, then [DONE]. leave: called at the end, and when the client goes away before it."""

    def __init__(self, told: AsyncIterator[Json], leave: Callable[[], None]) -> None:
        super().__init__(_events(told), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _events(told: AsyncIterator[Json]) -> AsyncIterator[str]:
    try:
        async for data in told:
            yield _event(data)
    except Exception as error:  # the status line is long sent: the error becomes an event
        if not isinstance(error, errors.EXPECTED):
            log.exception("a stream failed")
        yield _event(errors.problem_of(error).envelope())
    yield "data: [DONE]\n\n"


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"  # in ASCII: some clients end a line at U+2028 and U+0085 too
