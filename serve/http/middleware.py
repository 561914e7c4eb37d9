"""ASGI middleware that every request passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import Collection
from ipaddress import ip_address

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.generation.rate_limits import RATES, RateLimitError
from serve.generation.service import Service
from serve.http.auth import OPEN, KeyRing, bearer_token
from serve.http.errors import CLIENT_GONE, path_of, problem_of
from serve.http.logs import CURRENT_REQUEST, access

BODY_LIMIT = 1 << 20
"""Most bytes of a request body."""

BODY_TOO_LARGE = f"body: must be at most {BODY_LIMIT} bytes"

REQUEST_ID = re.compile(rb"[\w.:-]{1,100}")


class Middleware:
    """Checks host, key, rate limit and body size; adds the request id; records metrics and the access log.

    Also answers HEAD like GET, turns unexpected errors into the error envelope, cancels requests whose client
    disconnects, and releases admitted ones.
    """

    def __init__(
        self, app: ASGIApp, service: Service, keys: KeyRing | None, hosts: Collection[str], root_path: str
    ) -> None:
        """Wrap an app.

        keys: None for a service without keys.
        hosts: accepted names beside addresses and localhost; "*" for any.
        root_path: prefix that paths may have.
        """
        self._app, self._service, self._keys, self._root_path = app, service, keys, root_path
        self._hosts = {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, method = time.perf_counter(), scope["method"]
        status, num_bytes, started, request_id = CLIENT_GONE, 0, False, _request_id(scope)
        CURRENT_REQUEST.set(request_id)
        scope["root_path"] = self._root_path
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server itself must see HEAD, to expect no body

        async def recorded(message: Message) -> None:
            nonlocal status, num_bytes, started
            started = True
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [*self._rate_limit_headers(scope.get("key_name")), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            elif message["type"] == "http.response.body":
                message = {**message, "body": b""} if method == "HEAD" else message
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                return await problem_of(refusal).response()(scope, receive, recorded)
            return await self._run(scope, receive, recorded)
        except Exception as error:
            if not started:
                await problem_of(error).response()(scope, receive, recorded)
            raise  # into the server's log
        finally:
            seconds = time.perf_counter() - start
            if (ctx := scope.get("request_context")) is not None:
                self._service.engine.release(ctx)
            route = getattr(scope.get("route"), "path", "none")
            self._service.metrics.record_response(method, route, status, seconds)
            self._log(scope, method, {"status": status, "bytes": num_bytes}, seconds, request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on the whole body; cancel it when the client disconnects."""
        try:
            body = await _read_body(receive)
        except HTTPException as error:
            return await problem_of(error).response()(scope, receive, send)
        if body is None:
            return None
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.create_task(_disconnect(receive))

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await asyncio.wait({disconnected})  # not awaited itself: cancelling the app would cancel it, too
            return {"type": "http.disconnect"}

        app = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            await asyncio.wait({app, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            app.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await app
        return None

    def _refusal(self, scope: Scope) -> Exception | None:
        """Return the error that the request is refused with. Stores the key's name in the scope."""
        if not self._is_allowed(host := _host(scope)):
            return HTTPException(421, f"Host: {host!r} is not allowed; add it to --allowed-hosts")
        if self._keys is not None and path_of(scope) not in OPEN:
            name = self._keys.name_of(bearer_token(scope))
            if name is None:
                message = "The API key is missing or unknown; send Authorization: Bearer KEY"
                return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
            scope["key_name"] = name
            try:
                self._service.rate_limiter.check(name, "requests")
            except RateLimitError as error:
                return error
            self._service.rate_limiter.charge(name, "requests", 1)
        # The server has checked that the header is a number.
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        return HTTPException(413, BODY_TOO_LARGE) if length > BODY_LIMIT else None

    def _is_allowed(self, host: str) -> bool:
        """Return True for a Host to answer for.

        A page of another site whose name resolves to this service could otherwise read its responses (DNS rebinding).
        """
        return "*" in self._hosts or host in self._hosts or host == "localhost" or _is_address(host)

    def _rate_limit_headers(self, name: str | None) -> list[tuple[bytes, bytes]]:
        """Return rate-limit headers of a key, by OpenAI's names."""
        headers: list[tuple[str, str]] = []
        for rate in RATES if name is not None else ():
            if (bucket := self._service.rate_limiter.bucket(name or "", rate)) is not None:
                headers.append((f"x-ratelimit-limit-{rate}", str(bucket.limit)))
                headers.append((f"x-ratelimit-remaining-{rate}", str(max(0, int(bucket.level)))))
                headers.append((f"x-ratelimit-reset-{rate}", f"{bucket.seconds(bucket.limit)}s"))
        return [(header.encode(), value.encode()) for header, value in headers]

    def _log(self, scope: Scope, method: str, response: dict[str, int], seconds: float, request_id: str) -> None:
        client = scope.get("client") or ("-", 0)
        entry = {
            "client": client[0],
            "key": scope.get("key_name"),
            "method": method,
            "path": scope["path"],
            **response,
            "ms": round(1000 * seconds, 1),
            "request_id": request_id,
        }
        access.info(entry)


async def _read_body(receive: Receive) -> bytes | None:
    """Read a body of at most BODY_LIMIT bytes: a chunked one announces no length. None if the client disconnects.

    Raises:
        HTTPException: too large, or a lone surrogate, which is valid JSON but cannot be encoded.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > BODY_LIMIT:
            raise HTTPException(413, BODY_TOO_LARGE)
        if not message.get("more_body", False):
            break
    _check_surrogates(body)
    return bytes(body)


def _check_surrogates(body: bytearray) -> None:
    # Escaped, as bytes, or in UTF-16 or UTF-32, which JSON may be, too.
    if any(sign in body for sign in (b"\\ud", b"\\uD", b"\xed", b"\0")):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise HTTPException(400, "body: contains a lone surrogate (\\ud800 … \\udfff)") from error
        except (ValueError, RecursionError):
            return  # not JSON, which the route reports


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    """Return the client's id if it is safe to log and echo, else a new one."""
    header = dict(scope["headers"]).get(b"x-request-id", b"")
    return header.decode() if REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


def _host(scope: Scope) -> str:
    """Return the name in the Host header, without its port."""
    header = str(dict(scope["headers"]).get(b"host", b"").decode("latin-1")).strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
