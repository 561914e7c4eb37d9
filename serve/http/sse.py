"""Server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from serve.http import errors

Json = dict[str, Any]

log = logging.getLogger(__name__)


def event_stream(data: AsyncIterator[Json]) -> StreamingResponse:
    """Return a response of one event per object, then [DONE]."""
    return StreamingResponse(_events(data), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


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
