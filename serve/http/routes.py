"""Dependencies shared by all APIs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from loopwm.records.template import FormatError
from serve.generation.service import RequestContext, Service

MAX_SECONDS = 3600.0
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds after which the request is cancelled and answered with 504."""

# Dependencies are coroutines: FastAPI runs plain functions in threads, which costs more than these do.


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _owner(request: Request) -> str:
    """Return the name of the request's key; empty for a service without keys."""
    return request.scope.get("key_name", "")


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
