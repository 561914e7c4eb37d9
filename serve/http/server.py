"""HTTP server with idle and slow-reader timeouts and graceful shutdown."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.generation.service import Service

FLUSH_SECONDS = 2
"""Time to send responses after the engine has stopped."""

KEEP_ALIVE_SECONDS = 75
"""Idle time of a connection; longer than clients keep theirs (httpx, so openai: 5 s), because a request sent while the
server closes the connection is lost."""

READ_SECONDS = 30.0
"""Time to receive a request, from the connection or its first byte to its last."""

WRITE_SECONDS = 30.0
"""Time that a client may stop reading."""

SPARE_DESCRIPTORS = 64
"""File descriptors reserved for everything but connections."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with time limits. At too many connections, the one idle for longest is closed."""

    # Connections without a complete request, oldest first.
    idle: ClassVar[dict[Connection, None]] = {}
    count: ClassVar[int] = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        Connection.count += 1
        if Connection.count > _most_connections() and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]  # now: `connection_lost` runs only after all connections of this batch
            oldest.transport.abort()
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        Connection.count -= 1
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_read_timer()
        self._start_read_timer()

    def on_message_complete(self) -> None:
        self._stop_read_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _start_read_timer(self) -> None:
        self.idle[self] = None
        self._reading = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def _stop_read_timer(self) -> None:
        self.idle.pop(self, None)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_write_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def _most_connections() -> int:
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS)


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown."""

    def __init__(self, app: FastAPI, service: Service, grace: float) -> None:
        """Create a server.

        grace: seconds that running requests have after a signal; the rest is answered with 503.
        """
        end = max(1, round(grace + FLUSH_SECONDS))
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
        asyncio.get_running_loop().call_later(self._grace, self._service.engine.stop)
        await super().shutdown(sockets)
