"""HTTP app. Knows neither tensors nor token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from serve import playground
from serve.generation.service import EngineStoppedError
from serve.http import errors
from serve.http import openai as openai_api
from serve.http import pixels as pixel_api
from serve.http import worlds as world_api
from serve.http.auth import OPEN, KeyRing
from serve.http.middleware import Middleware
from serve.http.routes import Serving
from serve.http.schemas import Health, Version
from serve.pixels.games import Games
from serve.worlds.sessions import Sessions

VERSION = version("loopwm")

METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def create_app(
    sessions: Sessions,
    keys: KeyRing | None = None,
    hosts: Collection[str] = (),
    origins: Sequence[str] = (),
    root_path: str = "",
) -> FastAPI:
    """Create the app of a running service.

    keys: None for a service without keys.
    hosts: host names to answer for.
    origins: sites whose pages may read responses (CORS); pages of others cannot.
    root_path: prefix of all paths, whether a proxy removes it or not.
    """
    error = {"model": errors.ErrorBody, "description": "Error"}
    responses: dict[int | str, dict[str, Any]] = {"4XX": error, "5XX": error}
    servers = [{"url": root_path}] if root_path else None
    about: dict[str, Any] = {"title": "LoopWM", "version": VERSION, "servers": servers, "responses": responses}
    app = FastAPI(docs_url=None, redoc_url=None, **about)
    service = sessions.service
    app.state.service, app.state.sessions = service, sessions
    app.state.games = Games(service)
    service.metrics.watch_worlds(lambda: len(sessions.store))
    app.add_middleware(Middleware, service=service, keys=keys, hosts=hosts, root_path=root_path)
    if origins:  # outside the other one: a preflight request has no key
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_api_route("/health", health, methods=["GET"], response_model=Health)
    app.add_api_route("/ready", ready, methods=["GET"], response_model=Health)
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, responses=METRICS)
    app.add_api_route("/version", show_version, methods=["GET"], response_model=Version)
    for part in (openai_api, world_api, pixel_api, playground):
        app.include_router(part.router)
    errors.install(app)
    _complete(app.openapi(), service.card.names, has_keys=keys is not None)
    return app


def _complete(description: dict[str, Any], names: Sequence[str], has_keys: bool) -> None:
    """Insert the served model's names and the key into the API description, which is built once."""
    for title, schema in description["components"]["schemas"].items():
        if "model" in schema.get("required", []):
            # A batch accepts any name: its response has an error per request.
            keyword = "examples" if title == "BatchCreate" else "enum"
            schema["properties"]["model"] = {"type": "string", keyword: list(names)}
    if has_keys:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in description["paths"].keys() - set(OPEN):
            for operation in description["paths"][path].values():
                operation["security"] = [{"key": []}]


async def ready(worlds: world_api.Worlds) -> dict[str, Any]:
    """Return like `/health`; 503 also while the service drains, or misses its worlds file or the server of --engine."""
    if worlds.service.draining:
        raise EngineStoppedError("it is about to stop")
    if worlds.store.failing:
        worlds.store.write()
    await worlds.service.engine.check_source()
    return await health(worlds.service)


async def health(service: Serving) -> dict[str, Any]:
    """Return the numbers of running and waiting requests; 503 if the engine has stopped or makes no progress."""
    if not service.engine.progressing:
        raise EngineStoppedError("the engine makes no progress")
    running, waiting = service.engine.load
    return {"status": "ok", "running": running, "waiting": waiting}


async def metrics(service: Serving) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def show_version() -> dict[str, str]:
    return {"version": VERSION}
