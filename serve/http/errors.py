"""The one place that turns whatever goes wrong into OpenAI's error envelope.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loopwm.records.template import ContextTooLongError, FormatError
from serve.generation.prompts import PromptTooLongError
from serve.generation.rate_limits import RateLimitError
from serve.generation.service import (
    DEPTH_RULES,
    CompletionTooLongError,
    DeadlineError,
    EngineStoppedError,
    ModelNotFoundError,
    QueueFullError,
)
from serve.worlds.sessions import UnsupportedError
from serve.worlds.store import (
    TooManyWorldsError,
    TooMuchTextError,
    WorldBusyError,
    WorldGoneError,
    WorldNotFoundError,
)

CLIENT_GONE = 499
"""nginx's status of a request whose client left before the answer. Nobody reads it but logs."""

RETRY_AFTER_SECONDS = 1
"""Where nothing better is known."""


class BodyTooLargeError(HTTPException):
    """More bytes than a request may have. An HTTPException, because only those pass FastAPI's reading of bodies."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"The request body is larger than {limit} bytes")


class TooManyItemsError(HTTPException):
    """More values than any request has. An HTTPException, because only those pass FastAPI's reading of bodies."""

    def __init__(self, limit: str) -> None:
        super().__init__(413, f"The request body has more than {limit}")


class WrongBodyError(HTTPException):
    """A body that its route does not take. An HTTPException, because only those pass FastAPI's reading of bodies."""

    def __init__(self, faults: Sequence[Any]) -> None:
        super().__init__(400)
        self.faults = RequestValidationError(faults)


class WrongHostError(HTTPException):
    """The Host header names a host that the service does not answer for: a page of another site may have asked."""

    def __init__(self, host: str) -> None:
        told = f"This service does not answer for the host {host!r}: --allowed-hosts names more"
        super().__init__(421, told)


class WrongKeyError(HTTPException):
    """No key, or none that the service knows. An HTTPException, because it is raised outside of the routes."""

    def __init__(self) -> None:
        told = "This service needs a key it knows: Authorization: Bearer KEY"
        super().__init__(401, told, {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class Problem:
    """One error as clients see it. `kind` is sent as `type`."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        retry = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else {}
        return JSONResponse(self.envelope(), self.status, {**retry, **self.headers})


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorFields


WRONG_FIELD: dict[type[FormatError], str] = {
    ContextTooLongError: "context_length_exceeded",
    PromptTooLongError: "context_length_exceeded",
    FormatError: "invalid_value",
    UnsupportedError: "unsupported_by_model",
}
"""Codes of errors that name the field of the request at fault."""

REFUSED: dict[type[Exception], tuple[int, str, str | None]] = {
    CompletionTooLongError: (400, "context_length_exceeded", "max_tokens"),
    ModelNotFoundError: (404, "model_not_found", "model"),
    WorldNotFoundError: (404, "world_not_found", None),
    WorldBusyError: (409, "world_busy", None),
    WorldGoneError: (410, "world_gone", None),
    TooManyWorldsError: (429, "too_many_worlds", None),
    TooMuchTextError: (429, "too_much_text", None),
    DeadlineError: (504, "deadline_exceeded", None),
}
"""Status, code and field of what else a client can get wrong."""

CODES = {
    400: "invalid_json",
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
    421: "host_not_allowed",
}
"""Codes of what fails before a route is reached; 400 is a body that is not text in UTF-8."""

CLOSED = {"Connection": "close"}
"""The server drops the connection of a request that failed: its client must not send the next one there."""

OVERLOADED = {QueueFullError: "overloaded", EngineStoppedError: "unavailable"}
"""Codes of what is answered with 503."""


def problem_of(error: Exception) -> Problem:
    """Status and envelope of any exception."""
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, WrongBodyError):
        return _of_validation(error.faults)
    if isinstance(error, HTTPException):
        return _of_status(error)
    if isinstance(error, FormatError):
        return Problem(400, str(error), param=error.field, code=WRONG_FIELD[type(error)])
    kind = type(error)
    if kind in REFUSED:
        status, code, param = REFUSED[kind]
        return Problem(status, str(error), param=param, code=code)
    if isinstance(error, RateLimitError):
        headers = {"Retry-After": str(error.retry_after)}
        return Problem(429, str(error), error.rate, code="rate_limit_exceeded", headers=headers)
    if kind in OVERLOADED:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
        told = f"The service is not available: {error}"
        return Problem(503, told, "server_error", code=OVERLOADED[kind], headers=headers)
    told = "The service failed; its log has the reason"
    return Problem(500, told, "server_error", code="internal_error", headers=CLOSED)


def _of_status(error: HTTPException) -> Problem:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = CODES.get(error.status_code)
    return Problem(error.status_code, str(error.detail), kind, code=code, headers=error.headers or {})


def _of_validation(error: RequestValidationError) -> Problem:
    """The first fault of a body. Of a field that may have several types, a fault in one tells more than "not one"."""
    faults = error.errors()
    same_field = [fault for fault in faults if fault["loc"][:2] == faults[0]["loc"][:2]]
    first = next((fault for fault in same_field if not fault["type"].endswith("_type")), faults[0])
    if first["type"] == "json_invalid":
        return Problem(400, f"The body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = _field(first)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return Problem(400, f"{param or 'body'}: {_message(first)}", param=param, code=code)


def _field(fault: Mapping[str, Any]) -> str | None:
    """The field at fault. One that is missing, or unknown, is named as it is, whatever its name looks like."""
    place = fault["loc"][1:]
    if not place or fault["type"] not in ("missing", "extra_forbidden"):
        return _path(place)
    inside = _path(place[:-1])
    return f"{inside}.{place[-1]}" if inside else str(place[-1])


def _message(fault: Mapping[str, Any]) -> str:
    """What pydantic says, but where it speaks of its own inside."""
    if fault["type"] == "extra_forbidden":
        return "unknown field"
    if fault["type"] == "union_tag_invalid":
        told = fault["ctx"]
        return f"{told['discriminator']} {told['tag']!r} is not one of {told['expected_tags']}"
    if fault["type"] == "model_attributes_type" and fault["loc"] == ("body",):
        return "expected a JSON object, sent with Content-Type: application/json"
    return str(fault["msg"])


TAGS = {*DEPTH_RULES, "create", "step", "observe", "delete"}
"""Names of the alternatives of a field that say in the request which they are."""


def _path(location: Sequence[str | int]) -> str | None:
    """('messages', 0, 'role') -> 'messages[0].role'. Names of alternatives, such as 'str' or a rule's, are no part of
    it."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", *TAGS):
            path += f".{part}" if path else part
    return path or None


async def _respond(request: Request, error: Exception) -> JSONResponse:
    problem = problem_of(error)
    if problem.status == 405:
        problem = replace(problem, headers={"Allow": ", ".join(_methods(request))})
    return problem.response()


def _methods(request: Request) -> list[str]:
    """All that there are for a path; Starlette itself names those of its first route."""
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    fitting = (told for path, told in paths.items() if compile_path(path)[0].match(request.url.path))
    return sorted({method.upper() for told in fitting for method in told})


EXPECTED = (RequestValidationError, HTTPException, RateLimitError, *WRONG_FIELD, *REFUSED, *OVERLOADED)
"""What is answered quietly. Anything else is a fault of the service: answered with 500, and its traceback logged."""


def install(app: FastAPI) -> None:
    """Answers what is expected with its envelope; `Faults` has the rest."""
    for kind in EXPECTED:
        app.add_exception_handler(kind, _respond)


class Faults:
    """ASGI middleware, the innermost: whatever nobody expected is answered with 500, through all that watch answers,
    and goes on as an exception, into the server's log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] == "http" and not begun:
                await problem_of(error).response()(scope, receive, send)
            raise
