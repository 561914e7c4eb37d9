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
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from loopwm.records.template import FormatError
from serve.generation.service import RequestContext, Service
from serve.http.errors import CLIENT_GONE, TooManyItemsError, WrongBodyError

Json = dict[str, Any]

MAX_ITEMS = 100_000
"""Most values in a body: to read and check more takes too long."""

MAX_OBJECTS = 20_000
"""Most objects among them, which take longest: those of a body with a text in each hardly fit into its bytes."""

SHORT = 16_384
"""Bytes that are read at once; what is longer, in a thread, beside which others are answered."""

MAX_SECONDS = 3600.0
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that a client waits: later the work is given up and answered with 504."""


Check = Callable[[Any], tuple[Any, list[Any]]]
"""Of a parsed body: what the route takes, and what is wrong with it."""


class ParsedRequest(Request):
    """A request whose body is parsed and checked beside the event loop where it is long. What was checked here, FastAPI
    takes as it is."""

    def __init__(self, scope: Scope, receive: Receive, check: Check) -> None:
        super().__init__(scope, receive)
        self._check = check

    async def json(self) -> Any:
        body = await self.body()
        return _parse(body) if len(body) <= SHORT else await asyncio.to_thread(self._checked, body)

    def _checked(self, body: bytes) -> Any:
        taken, faults = self._check(_parse(body))
        if faults:
            raise WrongBodyError(faults)
        return taken


class CancelledWithClient(APIRoute):
    """A route whose work ends when the client goes away. What streams its answer sees to that itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            parsed = ParsedRequest(request.scope, request.receive, self._check)
            try:
                await parsed.body()  # what comes after it can only be the client's leave
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            work, leave = asyncio.ensure_future(handle(parsed)), asyncio.create_task(_leave(request))
            try:
                await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else Response(status_code=CLIENT_GONE)
            finally:
                work.cancel()
                leave.cancel()

        return answer

    def _check(self, body: Any) -> tuple[Any, list[Any]]:
        return (body, []) if self.body_field is None else self.body_field.validate(body, {}, loc=("body",))


def _parse(body: bytes) -> Any:
    """Raises HTTPException for too many values and for escapes of half a character: JSON may hold them, and nothing can
    write them out."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        raise TooManyItemsError(f"{MAX_ITEMS} values")
    if body.count(b"{") > MAX_OBJECTS:
        raise TooManyItemsError(f"{MAX_OBJECTS} objects")
    parsed = json.loads(body, object_hook=_pause)
    if b"\\ud" in body.lower():
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            told = "The body holds a surrogate escape (\\ud800 … \\udfff) without its other half"
            raise HTTPException(400, told) from error
    return parsed


def _pause(parsed: Json) -> Json:
    """Code of Python between two objects: the parser, which is none, would keep the interpreter to its end."""
    return parsed


async def _leave(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Dependencies are coroutines, since FastAPI sends plain functions to threads, which cost more than they do.


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _owner(request: Request) -> str:
    """Whose request it is: the name of the key, the same for all where the service asks for none."""
    owner: str = request.scope.get("key_name", "")
    return owner


Serving = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]


async def _admit(request: Request, service: Serving, owner: Owner) -> RequestContext:
    """A place among the requests that are worked on, which `serve.http.middleware.Edge` gives back."""
    ctx = service.admit(owner, _seconds(request.headers.get(TIMEOUT_HEADER)))
    request.scope["request_context"] = ctx
    return ctx


def _seconds(told: str | None) -> float:
    try:
        seconds = MAX_SECONDS if told is None else float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise FormatError(TIMEOUT_HEADER, f"expected seconds, more than 0 and at most {MAX_SECONDS:g}")
    return seconds


Admitted = Annotated[RequestContext, Depends(_admit)]
