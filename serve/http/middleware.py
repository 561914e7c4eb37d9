"""The edge of the service: what every request passes first and last, whatever it asks for."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.generation.service import Service
from serve.http.errors import CLIENT_GONE, WrongHostError, problem_of

access = logging.getLogger("serve.access")

REQUEST_ID = re.compile(rb"[\w.:-]{1,100}")


class Edge:
    """ASGI middleware, the outermost: gives every request an id, HEAD to what there is by GET, a line in the access log
    and its place in the metrics; and gives back its place among those that are worked on."""

    def __init__(self, app: ASGIApp, service: Service, log_json: bool) -> None:
        self._app, self._service, self._log_json = app, service, log_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        method, begun = scope["method"], time.perf_counter()
        answer = Answer(send, _request_id(scope), head=method == "HEAD")
        if answer.head:
            scope = {**scope, "method": "GET"}  # the server counts bytes by its own, and expects none for HEAD
        try:
            await self._app(scope, receive, answer.send)
        finally:
            seconds = time.perf_counter() - begun
            if (ctx := scope.get("request_context")) is not None:
                self._service.release(ctx)
            route = getattr(scope.get("route"), "path", "none")
            self._service.metrics.answered(method, route, answer.status, seconds)
            self._log(scope, method, answer, seconds)

    def _log(self, scope: Scope, method: str, answer: Answer, seconds: float) -> None:
        client = scope.get("client") or ("-", 0)
        told: dict[str, Any] = {
            "client": client[0],
            "key": scope.get("key_name"),
            "method": method,
            "path": scope["path"],
            "status": answer.status,
            "bytes": answer.bytes,
            "ms": round(1000 * seconds, 1),
            "request_id": answer.request_id,
        }
        if self._log_json:
            access.info("%s", json.dumps({"time": round(time.time(), 3), **told}))
        else:
            access.info("%s", " ".join("-" if value is None else _plain(value) for value in told.values()))


def _plain(value: Any) -> str:
    """Without what would make a second line, or a second word, of it."""
    return "".join(c if c.isprintable() and c != " " else "?" for c in str(value))


class Answer:
    """What is sent, watched. request_id: goes with it."""

    def __init__(self, send: Send, request_id: str, head: bool) -> None:
        self.request_id, self.head = request_id, head
        self.status, self.bytes = CLIENT_GONE, 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            header = (b"x-request-id", self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", []), header]}
        elif message["type"] == "http.response.body":
            self.bytes += 0 if self.head else len(message.get("body", b""))
            message = {**message, "body": b""} if self.head else message
        await self._send(message)


def _request_id(scope: Scope) -> str:
    """The client's own, if it is a decent one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class HostCheck:
    """ASGI middleware: 421 for a Host that is neither an address, nor this machine itself, nor one of `names`. A page
    of another site whose name was made to point here could otherwise read the answers."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._knows(host := _host(scope)):
            return await problem_of(WrongHostError(host)).response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        return "*" in self._names or host in self._names or host == "localhost" or _is_address(host)


def _host(scope: Scope) -> str:
    """The name in the Host header, without its port."""
    given = str(dict(scope["headers"]).get(b"host", b"").decode("latin-1")).strip().lower()
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
