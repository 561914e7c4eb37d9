"""What routes of all APIs share: who asks whom, and the end of work that nobody waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from serve.words.service import Service

CLIENT_GONE = 499
"""nginx's status for it. Nobody reads it but logs."""


class CancelledWithClient(APIRoute):
    """A route whose work ends when the client goes away. What streams its answer sees to that itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            _check_text(await request.body())  # what comes after it can only be the client's leave
            work, leave = asyncio.ensure_future(handle(request)), asyncio.create_task(_leave(request))
            try:
                await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else Response(status_code=CLIENT_GONE)
            finally:
                work.cancel()
                leave.cancel()

        return answer


def _check_text(body: bytes) -> None:
    """Raises HTTPException for escapes of half a character: JSON may hold them, and nothing can write them out."""
    if b"\\ud" not in body.lower():
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise HTTPException(
            400, "The body holds a surrogate escape (\\ud800 … \\udfff) without its other half"
        ) from error
    except (ValueError, RecursionError):
        return  # no JSON at all, which is told better by those who read it


async def _leave(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Dependencies are coroutines, since FastAPI sends plain functions to threads, which cost more than they do.


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service)]
