"""An upper bound on request bodies, enforced before anything reads them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.http.errors import BodyTooLargeError, problem_of


class BodyLimit:
    """ASGI middleware: a body over `limit` bytes is answered with 413, whether its length is announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announced(scope) > self._limit:
            await problem_of(BodyTooLargeError(self._limit)).response()(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._limit:
                raise BodyTooLargeError(self._limit)
            return message

        return counted


def _announced(scope: Scope) -> int:
    """The Content-Length header, 0 without one. The server has checked that it is a number."""
    return int(dict(scope["headers"]).get(b"content-length", b"0"))
