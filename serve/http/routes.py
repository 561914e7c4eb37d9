"""Route class and dependencies shared by all APIs."""

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
"""Most values in a body: parsing and validating more takes seconds."""

MAX_OBJECTS = 20_000
"""Most objects among them, which take longest; more than valid bodies of this size contain."""

SHORT = 16_384
"""Bytes up to which a body is parsed on the event loop; longer ones are parsed in a thread."""

MAX_SECONDS = 3600.0
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds after which the request is cancelled and answered with 504."""

Check = Callable[[Any], tuple[Any, list[Any]]]
"""Validator of a parsed body: returns the value and a list of errors."""


class ParsedRequest(Request):
    """Request that parses and validates a long body in a thread. FastAPI accepts the validated value as it is."""

    def __init__(self, scope: Scope, receive: Receive, check: Check) -> None:
        super().__init__(scope, receive)
        self._check = check

    async def json(self) -> Any:
        body = await self.body()
        return _parse(body) if len(body) <= SHORT else await asyncio.to_thread(self._validated, body)

    def _validated(self, body: bytes) -> Any:
        value, errors = self._check(_parse(body))
        if errors:
            raise WrongBodyError(errors)
        return value


class CancellableRoute(APIRoute):
    """Route that cancels its handler when the client disconnects. Event streams handle that themselves."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            parsed = ParsedRequest(request.scope, request.receive, self._check)
            try:
                await parsed.body()  # afterwards `receive` can only return a disconnect
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            work, disconnect = asyncio.ensure_future(handle(parsed)), asyncio.create_task(_disconnect(request))
            try:
                await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else Response(status_code=CLIENT_GONE)
            finally:
                work.cancel()
                disconnect.cancel()

        return answer

    def _check(self, body: Any) -> tuple[Any, list[Any]]:
        return (body, []) if self.body_field is None else self.body_field.validate(body, {}, loc=("body",))


def _parse(body: bytes) -> Any:
    """Parse JSON.

    Raises:
        HTTPException: too many values, or a lone surrogate escape, which is valid JSON but cannot be encoded.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        raise TooManyItemsError(f"{MAX_ITEMS} values")
    if body.count(b"{") > MAX_OBJECTS:
        raise TooManyItemsError(f"{MAX_OBJECTS} objects")
    parsed = json.loads(body, object_hook=_pause)
    if b"\\ud" in body.lower():
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise HTTPException(400, "body: contains a lone surrogate escape (\\ud800 … \\udfff)") from error
    return parsed


def _pause(parsed: Json) -> Json:
    """Run Python code between two objects: the C parser does not let the interpreter switch threads."""
    return parsed


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Dependencies are coroutines: FastAPI runs plain functions in threads, which costs more than these do.


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _owner(request: Request) -> str:
    """Return the name of the request's key; empty for a service without keys."""
    owner: str = request.scope.get("key_name", "")
    return owner


Serving = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]


async def _admit(request: Request, service: Serving, owner: Owner) -> RequestContext:
    """Admit the request; `serve.http.middleware` releases it."""
    ctx = service.admit(owner, _seconds(request.headers.get(TIMEOUT_HEADER)))
    request.scope["request_context"] = ctx
    return ctx


def _seconds(header: str | None) -> float:
    try:
        seconds = MAX_SECONDS if header is None else float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise FormatError(TIMEOUT_HEADER, f"must be seconds, more than 0 and at most {MAX_SECONDS:g}, got {header!r}")
    return seconds


Admitted = Annotated[RequestContext, Depends(_admit)]
