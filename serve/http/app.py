"""The HTTP layer as one app. Knows no tensors and no token ids of its own."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve import playground
from serve.generation.service import EngineStoppedError
from serve.http import errors
from serve.http import openai as openai_api
from serve.http import tokens as tokens_api
from serve.http import worlds as world_api
from serve.http.auth import KeyCheck, KeyRing
from serve.http.limits import BodyLimit
from serve.http.middleware import Edge, HostCheck
from serve.http.openai_replies import Health, Version
from serve.http.routes import Serving
from serve.worlds.sessions import Sessions

BODY_LIMIT = 1 << 20
"""Most bytes of a request body."""

VERSION = version("loopwm")

METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def create_app(
    sessions: Sessions, keys: KeyRing | None = None, hosts: Collection[str] = (), log_json: bool = False
) -> FastAPI:
    """The app of a running service; without keys everybody is let in. hosts: names that it answers for.

    It sends no CORS headers: pages of other sites can not read its answers.
    """
    told = {"model": errors.ErrorBody, "description": "What is wrong"}
    app = FastAPI(title="LoopWM", version=VERSION, docs_url=None, redoc_url=None, responses={"4XX": told, "5XX": told})
    app.state.service, app.state.sessions = sessions.service, sessions
    sessions.service.metrics.watch_worlds(lambda: len(sessions.store), sessions.service.memory)
    app.add_middleware(errors.Faults)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys, rate_limiter=sessions.service.rate_limiter)
    app.add_middleware(HostCheck, names=hosts)
    app.add_middleware(Edge, service=sessions.service, log_json=log_json)
    app.add_api_route("/health", health, methods=["GET"], response_model=Health)
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, responses=METRICS)
    app.add_api_route("/version", show_version, methods=["GET"], response_model=Version)
    for part in (openai_api, tokens_api, world_api, playground):
        app.include_router(part.router)
    app.include_router(world_api.batch_router)
    errors.install(app)
    _name_the_model(app.openapi(), sessions.service.card.name)
    return app


def _name_the_model(told: dict[str, Any], name: str) -> None:
    """In the description of the API, which is made once: the one model that requests may ask for."""
    for title, schema in told["components"]["schemas"].items():
        if "model" in schema.get("required", []):
            told_of_it = (
                "examples" if title == "BatchCreate" else "enum"
            )  # a batch takes any, and its answer refuses it
            schema["properties"]["model"] = {"type": "string", told_of_it: [name]}


async def health(service: Serving) -> dict[str, Any]:
    """How many rows decode and how many requests wait; 503 when the engine is dead."""
    if not service.alive:
        raise EngineStoppedError("the engine is not running")
    running, waiting = service.load
    return {"status": "ok", "running": running, "waiting": waiting}


async def metrics(service: Serving) -> Response:
    """In Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def show_version() -> dict[str, str]:
    return {"version": VERSION}
