"""Server-sent events."""

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
    """Response of one event per object, then [DONE]."""

    def __init__(self, data: AsyncIterator[Json], close: Callable[[], None]) -> None:
        """Create a response.

        close: called at the end, and when the client disconnects.
        """
        super().__init__(_events(data), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(data: AsyncIterator[Json]) -> AsyncIterator[str]:
    try:
        async for item in data:
            yield _event(item)
    except Exception as error:  # the status line has been sent: the error becomes an event
        if not isinstance(error, errors.EXPECTED):
            log.exception("a stream failed")
        yield _event(errors.problem_of(error).envelope())
    yield "data: [DONE]\n\n"


def _event(item: Json) -> str:
    return f"data: {json.dumps(item)}\n\n"  # ASCII: some clients split lines at U+2028 and U+0085, too
