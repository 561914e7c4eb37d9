"""HTTP server with idle and slow-reader timeouts and graceful shutdown."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve.generation.service import Service

FLUSH_SECONDS = 2
"""Time to send responses after the engine has stopped."""

ARRIVAL_SECONDS = 0.5
"""Time in which requests of the last connections arrive."""

KEEP_ALIVE_SECONDS = 75
"""Idle time of a connection; longer than clients keep theirs (httpx, so openai: 5 s), because a request sent while the
server closes the connection is lost."""

READ_SECONDS = 30.0
"""Time to receive a request, from the connection or its first byte to its last."""

WRITE_SECONDS, WRITE_BYTES = 30.0, 64 << 10
"""Time in which a client must read some bytes of a response that waits."""

HEAD_BYTES, HEAD_LINES = 32 << 10, 100
"""Most bytes and lines of a request's head, trailers included."""

PIECE_BYTES = 4 << 10
"""Bytes that the parser gets at a time: it holds an unfinished line of any length."""

SPARE_DESCRIPTORS = 64
"""File descriptors reserved for everything but connections."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits of time and size. At too many connections, the longest idle one is closed."""

    # Connections without a complete request, oldest first.
    idle: ClassVar[dict[Connection, None]] = {}
    count: ClassVar[int] = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._head_bytes = self._head_lines = self._pending_bytes = 0
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

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + PIECE_BYTES]
            self._pending_bytes += len(piece)
            super().data_received(piece)
            if self._is_too_large and not self.transport.is_closing():
                self.send_400_response("")

    @property
    def _is_too_large(self) -> bool:
        return self._head_bytes + self._pending_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES

    def _count(self, num_bytes: int, lines: int = 0) -> None:
        """Count a finished part of the head. An error here makes the parser refuse the request."""
        self._head_bytes, self._head_lines = self._head_bytes + num_bytes, self._head_lines + lines
        self._pending_bytes = 0
        if self._is_too_large:
            raise ValueError("the head is too large")

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser does not take."""
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        self.transport.write(STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as without `Upgrade`; uvicorn would recommend a WebSocket library."""

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), lines=1)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_lines = self._pending_bytes = 0
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
        self._watch_writing()

    def _watch_writing(self, most: float = math.inf) -> None:
        """Close the connection unless less than `most` bytes wait, and look again later."""
        if (waiting := self.transport.get_write_buffer_size()) > most:
            self.transport.abort()
        else:
            self._writing = self.loop.call_later(WRITE_SECONDS, self._watch_writing, waiting - WRITE_BYTES)

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

    def __init__(
        self, app: FastAPI, service: Service, grace: float, drain: float = 0.0, proxies: Sequence[str] = ()
    ) -> None:
        """Create a server.

        grace: seconds that running requests have at the end; the rest is answered with 503.
        drain: seconds after a signal in which requests are still taken, while `/ready` is 503.
        proxies: addresses and networks whose X-Forwarded-For names the client.
        """
        end = max(1, round(grace + FLUSH_SECONDS))
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",  # uvicorn swaps the protocol of an upgrade, whose end would not be counted
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=end,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=list(proxies),
            )
        )
        self._service = service
        self._grace, self._drain = grace, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining, end = True, time.monotonic() + self._drain
        while time.monotonic() < end and not self.force_exit:  # a second SIGINT ends it
            await asyncio.sleep(0.1)
        for server in self.servers:
            server.close()  # further connections wait in the supervisor's socket, if there is one
        await asyncio.sleep(ARRIVAL_SECONDS)
        asyncio.get_running_loop().call_later(self._grace, self._service.engine.stop)
        await super().shutdown(sockets)
