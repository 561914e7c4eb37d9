"""Conversion of exceptions to OpenAI's error envelope.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import Scope

from loopwm.records.template import ContextTooLongError, FormatError
from serve.generation import service
from serve.generation.prompts import PromptTooLongError
from serve.generation.rate_limits import RateLimitError
from serve.worlds import store
from serve.worlds.sessions import UnsupportedError
from serve.worlds.sqlite import StorageError

CLIENT_GONE = 499
"""nginx's status, in logs and metrics only, of a request whose client disconnected before the response."""


@dataclass(frozen=True)
class Problem:
    """Error as sent to clients. kind: its type, if it is not that of the status."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None

    def envelope(self) -> dict[str, object]:
        kind = self.kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        retry = {"Retry-After": "1"} if self.status == 503 or self.code == "world_busy" else {}  # in s
        return JSONResponse(self.envelope(), self.status, {**retry, **self.headers})


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of error responses."""

    error: ErrorFields


ERRORS: dict[type[Exception], tuple[int, str, str | None]] = {
    ContextTooLongError: (400, "context_length_exceeded", None),
    PromptTooLongError: (400, "context_length_exceeded", None),
    service.CompletionTooLongError: (400, "context_length_exceeded", "max_tokens"),
    FormatError: (400, "invalid_value", None),
    UnsupportedError: (400, "unsupported_by_model", None),
    service.ModelNotFoundError: (404, "model_not_found", "model"),
    store.WorldNotFoundError: (404, "world_not_found", None),
    store.WorldBusyError: (409, "world_busy", None),
    store.StepIdReusedError: (409, "step_id_reused", "step_id"),
    store.WorldGoneError: (410, "world_gone", None),
    RateLimitError: (429, "rate_limit_exceeded", None),
    store.TooManyWorldsError: (429, "too_many_worlds", None),
    store.TooMuchTextError: (429, "too_much_text", None),
    service.EngineUnsupportedError: (501, "engine_unsupported", None),
    service.RemoteEngineError: (502, "engine_failed", None),
    service.QueueFullError: (503, "overloaded", None),
    service.EngineStoppedError: (503, "unavailable", None),
    StorageError: (503, "storage_unavailable", None),
    service.DeadlineError: (504, "deadline_exceeded", None),
}
"""Status, code and field; errors with a field of their own name it."""

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

EXPECTED = (RequestValidationError, HTTPException, *ERRORS)
"""Errors that are not logged. All others are answered with 500, and their tracebacks logged."""


def problem_of(error: Exception) -> Problem:
    """Return the status and envelope of an exception."""
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        code = CODES.get(error.status_code)
        return Problem(error.status_code, str(error.detail), code=code, headers=error.headers or {})
    if type(error) in ERRORS:
        status, code, param = ERRORS[type(error)]
        message = f"The service is not available: {error}" if status == 503 else str(error)
        headers = {"Retry-After": str(error.retry_after)} if hasattr(error, "retry_after") else {}
        kind: str | None = getattr(error, "rate", None)
        return Problem(status, message, param or getattr(error, "field", None), code, headers, kind)
    # Details stay in the log: the message of an unexpected error may contain another client's data.
    return Problem(500, "The service failed; see its log", code="internal_error", headers=CLOSED)


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
    if detail["type"] == "none_required" or (detail["type"] == "too_long" and not detail["ctx"]["max_length"]):
        return "not supported; leave it out"
    if detail["type"] == "list_type":
        value = json.dumps(detail["input"])
        return f"must be a list, got {value}; write [{value}]" if len(value) <= 40 else "must be a list; write [...]"
    if detail["type"] in BOUNDS:
        words, limit = BOUNDS[detail["type"]][0], detail["ctx"][BOUNDS[detail["type"]][1]]
        items = "item" if limit == 1 else "items"
        return f"must have {words} {limit} {items}, got {detail['ctx']['actual_length'] or 'none'}"
    if detail["type"] == "string_pattern_mismatch":
        return "must have a visible character"
    return str(detail["msg"]).removeprefix("Value error, ")


BOUNDS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
"""Words of the errors of a list's length, and the limits they name."""

TAGS = {*service.DEPTH_RULES, "create", "step", "observe", "delete"}
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


def path_of(scope: Scope) -> str:
    """Return the path of a request without the prefix that a proxy may have left."""
    return str(scope["path"]).removeprefix(scope["root_path"])


async def _respond(request: Request, error: Exception) -> JSONResponse:
    problem = problem_of(error)
    if problem.status == 405:
        # All methods of the path; Starlette itself lists only those of the first matching route.
        paths: dict[str, dict[str, object]] = request.app.openapi()["paths"]
        target = path_of(request.scope)
        fitting = (operations for path, operations in paths.items() if compile_path(path)[0].match(target))
        methods = sorted({method.upper() for operations in fitting for method in operations}) or ["GET"]  # of pages
        problem = replace(problem, headers={"Allow": ", ".join(methods)})
    return problem.response()


def install(app: FastAPI) -> None:
    """Register the handlers of expected errors; `serve.http.middleware` handles the rest."""
    for kind in EXPECTED:
        app.add_exception_handler(kind, _respond)
