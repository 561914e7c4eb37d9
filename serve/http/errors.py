"""Conversion of exceptions to OpenAI's error envelope.

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
"""nginx's status, in logs and metrics only, of a request whose client disconnected before the response."""

RETRY_AFTER_SECONDS = 1
"""Retry-After of 503 without an estimate."""


class BodyTooLargeError(HTTPException):
    """The request body is too large. An HTTPException, because FastAPI wraps all others when it reads bodies."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"body: must be at most {limit} bytes")


class WrongHostError(HTTPException):
    """The Host header names another host: the request may come from a page of another site."""

    def __init__(self, host: str) -> None:
        super().__init__(421, f"Host: {host!r} is not allowed; add it to --allowed-hosts")


class WrongKeyError(HTTPException):
    """The API key is missing or unknown."""

    def __init__(self) -> None:
        message = "The API key is missing or unknown; send Authorization: Bearer KEY"
        super().__init__(401, message, {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class Problem:
    """Error as sent to clients. `kind` is sent as `type`."""

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
    """Body of error responses."""

    error: ErrorFields


FIELD_ERRORS: dict[type[FormatError], str] = {
    ContextTooLongError: "context_length_exceeded",
    PromptTooLongError: "context_length_exceeded",
    FormatError: "invalid_value",
    UnsupportedError: "unsupported_by_model",
}
"""Codes of errors that name the invalid field."""

CLIENT_ERRORS: dict[type[Exception], tuple[int, str, str | None]] = {
    CompletionTooLongError: (400, "context_length_exceeded", "max_tokens"),
    ModelNotFoundError: (404, "model_not_found", "model"),
    WorldNotFoundError: (404, "world_not_found", None),
    WorldBusyError: (409, "world_busy", None),
    WorldGoneError: (410, "world_gone", None),
    TooManyWorldsError: (429, "too_many_worlds", None),
    TooMuchTextError: (429, "too_much_text", None),
    DeadlineError: (504, "deadline_exceeded", None),
}
"""Status, code and field of other client errors."""

CODES = {
    400: "invalid_json",
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
    421: "host_not_allowed",
}
"""Codes of errors before a route is reached; 400 is a body that is not UTF-8."""

CLOSED = {"Connection": "close"}
"""The server drops the connection after an unexpected error: the client must not reuse it."""

OVERLOADED = {QueueFullError: "overloaded", EngineStoppedError: "unavailable"}
"""Codes of 503 responses."""


def problem_of(error: Exception) -> Problem:
    """Return the status and envelope of an exception."""
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_status(error)
    if isinstance(error, FormatError):
        return Problem(400, str(error), param=error.field, code=FIELD_ERRORS[type(error)])
    kind = type(error)
    if kind in CLIENT_ERRORS:
        status, code, param = CLIENT_ERRORS[kind]
        return Problem(status, str(error), param=param, code=code)
    if isinstance(error, RateLimitError):
        headers = {"Retry-After": str(error.retry_after)}
        return Problem(429, str(error), error.rate, code="rate_limit_exceeded", headers=headers)
    if kind in OVERLOADED:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
        message = f"The service is not available: {error}"
        return Problem(503, message, "server_error", code=OVERLOADED[kind], headers=headers)
    # Details stay in the log: the message of an unexpected error may contain another client's data.
    message = "The service failed; see its log"
    return Problem(500, message, "server_error", code="internal_error", headers=CLOSED)


def _of_status(error: HTTPException) -> Problem:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = CODES.get(error.status_code)
    return Problem(error.status_code, str(error.detail), kind, code=code, headers=error.headers or {})


def _of_validation(error: RequestValidationError) -> Problem:
    """Report the first error of a body.

    A field of several types has one error per type; prefer an error in the value over a mismatch of the type.
    """
    details = error.errors()
    same_field = [detail for detail in details if detail["loc"][:2] == details[0]["loc"][:2]]
    first = next((detail for detail in same_field if not detail["type"].endswith("_type")), details[0])
    if first["type"] == "json_invalid":
        return Problem(400, f"The body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = _field(first)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return Problem(400, f"{param or 'body'}: {_message(first)}", param=param, code=code)


def _field(detail: Mapping[str, Any]) -> str | None:
    """Return the invalid field. A missing or unknown field keeps its name, even if it looks like a tag."""
    location = detail["loc"][1:]
    if not location or detail["type"] not in ("missing", "extra_forbidden"):
        return _path(location)
    parent = _path(location[:-1])
    return f"{parent}.{location[-1]}" if parent else str(location[-1])


def _message(detail: Mapping[str, Any]) -> str:
    """Return pydantic's message, except where it names internals."""
    if detail["type"] == "extra_forbidden":
        return "unknown field"
    if detail["type"] == "union_tag_invalid":
        union = detail["ctx"]
        return f"{union['discriminator']} must be one of {union['expected_tags']}, got {union['tag']!r}"
    if detail["type"] == "model_attributes_type" and detail["loc"] == ("body",):
        return "must be a JSON object, sent with Content-Type: application/json"
    return str(detail["msg"])


TAGS = {*DEPTH_RULES, "create", "step", "observe", "delete"}
"""Tags of discriminated unions."""


def _path(location: Sequence[str | int]) -> str | None:
    """Format ('messages', 0, 'role') as 'messages[0].role', without types and tags of unions."""
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
    """Return all methods of a path; Starlette itself lists only those of the first matching route."""
    paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
    fitting = (operations for path, operations in paths.items() if compile_path(path)[0].match(request.url.path))
    return sorted({method.upper() for operations in fitting for method in operations})


EXPECTED = (RequestValidationError, HTTPException, RateLimitError, *FIELD_ERRORS, *CLIENT_ERRORS, *OVERLOADED)
"""Errors that are not logged. All others are answered with 500, and their tracebacks logged."""


def install(app: FastAPI) -> None:
    """Register the handlers of expected errors; `serve.http.middleware` handles the rest."""
    for kind in EXPECTED:
        app.add_exception_handler(kind, _respond)
