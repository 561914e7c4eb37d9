"""The HTTP server, and how it ends: what runs may finish, what lasts too long hears so."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from serve.engine.engine import Engine

TELLING_SECONDS = 2
"""For answers on their way after the engine has stopped."""

KEEP_ALIVE_SECONDS = 75
"""For connections without a request: longer than clients keep theirs (httpx and so openai: 5 s), since a request that
meets the service closing its connection is lost."""


class Server(uvicorn.Server):
    """grace: seconds that running requests have when the server is told to end; then they are answered with 503."""

    def __init__(self, app: FastAPI, engine: Engine, grace: float) -> None:
        end = max(1, round(grace + TELLING_SECONDS))
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", timeout_graceful_shutdown=end, timeout_keep_alive=KEEP_ALIVE_SECONDS
            )
        )
        self._engine = engine
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace, self._engine.stop)
        await super().shutdown(sockets)
