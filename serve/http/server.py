"""The HTTP server: connections that say nothing or read nothing are closed; and how it ends: what runs may finish, what
lasts too long hears so."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.generation.service import Service

TELLING_SECONDS = 2
"""For answers on their way after the engine has stopped."""

KEEP_ALIVE_SECONDS = 75
"""For connections without a request: longer than clients keep theirs (httpx and so openai: 5 s), since a request that
meets the service closing its connection is lost."""

READ_SECONDS = 30.0
"""For a request to be there, from its connection or its first byte to its last."""

WRITE_SECONDS = 30.0
"""For a client to read on when it has stopped."""

SPARE_DESCRIPTORS = 64
"""Of those that the process may open: for all but connections."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with time limits. Where there are too many connections, the one that has been silent for the longest
    time gives way."""

    silent: ClassVar[dict[Connection, None]] = {}
    """Connections without a whole request, the oldest first."""
    count: ClassVar[int] = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        Connection.count += 1
        if Connection.count > _most_connections() and self.silent:
            oldest = next(iter(self.silent))
            del self.silent[oldest]  # at once: it is lost only after all that come with this one
            oldest.transport.abort()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        Connection.count -= 1
        self._has_request()
        self._reads_on()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_request()
        self._await_request()

    def on_message_complete(self) -> None:
        self._has_request()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.silent[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._reads_on()
        super().resume_writing()

    def _await_request(self) -> None:
        self.silent[self] = None
        self._reading = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def _has_request(self) -> None:
        self.silent.pop(self, None)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _reads_on(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def _most_connections() -> int:
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS)


class Server(uvicorn.Server):
    """grace: seconds that running requests have when the server is told to end; then they are answered with 503."""

    def __init__(self, app: FastAPI, service: Service, grace: float) -> None:
        end = max(1, round(grace + TELLING_SECONDS))
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=end,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._service = service
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace, self._service.stop)
        await super().shutdown(sockets)
