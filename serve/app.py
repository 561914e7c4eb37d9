"""The HTTP layer: routes, server-sent events, disconnects. Knows no tensors and no token ids of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from loopwm.text.format import FormatError
from serve import errors, playground, world_api
from serve.echo import echo_reply
from serve.engine import EngineStoppedError
from serve.limits import BodyLimit
from serve.prompts import Prompt, PromptReader
from serve.protocol import ChatBody, CompletionBody, GenerationBody
from serve.replies import ChatReply, CompletionReply, Reply
from serve.service import Service, TextStream
from serve.sessions import Sessions

BODY_LIMIT = 1 << 20
"""Most bytes of a request body."""

log = logging.getLogger(__name__)


def create_app(sessions: Sessions) -> FastAPI:
    """The app of a running service. It sends no CORS headers: pages of other sites can not read its answers."""
    app = FastAPI(title="LoopWM", docs_url=None, redoc_url=None)
    app.state.service, app.state.sessions = sessions.service, sessions
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name}", show_model, methods=["GET"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.include_router(world_api.router)
    app.include_router(playground.router)
    errors.install(app)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service)]


async def health(service: Serving) -> dict[str, Any]:
    if not service.engine.alive:
        raise EngineStoppedError("the engine is not running")
    running, waiting = service.engine.load
    return {"status": "ok", "running": running, "waiting": waiting}


async def list_models(service: Serving) -> dict[str, Any]:
    return {"object": "list", "data": [_model_object(service)]}


async def show_model(name: str, service: Serving) -> dict[str, Any]:
    service.check_model(name)
    return _model_object(service)


async def completions(body: CompletionBody, request: Request, service: Serving) -> Response:
    service.check_model(body.model)
    most = service.engine.limits.max_batch
    if not 1 <= len(body.prompts) <= most:
        raise FormatError("prompt", f"{len(body.prompts)} prompts given, expected 1 to {most}")
    if body.scores_prompt:
        return await _echo(body, service)
    prompts = _read(service.prompts, body)
    streams = _start(service, prompts, body)
    return await _answer(CompletionReply(service.card.name, prompts, streams), body, request)


async def _echo(body: CompletionBody, service: Service) -> Response:
    generated = body.max_tokens or 0
    prompts = _read(service.prompts.with_limit(service.card.max_length - generated), body)
    scores = await service.score(prompts)
    return JSONResponse(echo_reply(service, prompts, scores, generated, int(body.logprobs or 0)))


def _read(reader: PromptReader, body: CompletionBody) -> list[Prompt]:
    return [reader.text(prompt) if isinstance(prompt, str) else reader.ids(prompt) for prompt in body.prompts]


async def chat_completions(body: ChatBody, request: Request, service: Serving) -> Response:
    service.check_model(body.model)
    prompt = service.prompts.chat([(message.role, message.text) for message in body.messages])
    streams = _start(service, [prompt], body)
    return await _answer(ChatReply(service.card.name, [prompt], streams), body, request)


def _model_object(service: Service) -> dict[str, Any]:
    card = service.card
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "loopwm"}


def _start(service: Service, prompts: Sequence[Prompt], body: GenerationBody) -> list[TextStream]:
    """Queues all prompts of a request or none."""
    streams: list[TextStream] = []
    try:
        for prompt in prompts:
            streams.append(service.start(prompt, body.sampling, body.max_tokens, body.stops))
    except Exception:
        _cancel(streams)
        raise
    return streams


def _cancel(streams: Sequence[TextStream]) -> None:
    for stream in streams:
        stream.cancel()


async def _answer(reply: Reply, body: GenerationBody, request: Request) -> Response:
    if body.stream:
        return EventStream(reply, body.include_usage)
    watcher = asyncio.create_task(_cancel_on_disconnect(request, reply.streams))
    try:
        texts = [await stream.text() for stream in reply.streams]
    finally:
        watcher.cancel()
        _cancel(reply.streams)
    return JSONResponse(reply.whole(texts))


async def _cancel_on_disconnect(request: Request, streams: Sequence[TextStream]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    _cancel(streams)


class EventStream(StreamingResponse):
    """A reply as server-sent events. However it ends, its requests leave the engine."""

    def __init__(self, reply: Reply, include_usage: bool) -> None:
        super().__init__(_events(reply, include_usage), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._streams = reply.streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._streams)


async def _events(reply: Reply, include_usage: bool) -> AsyncIterator[str]:
    try:
        async for chunk in _chunks(reply, include_usage):
            yield _event(chunk)
    except Exception as error:  # the status line is long sent: the error becomes an event
        log.exception("a stream failed")
        yield _event(errors.problem_of(error).envelope())
    yield "data: [DONE]\n\n"


async def _chunks(reply: Reply, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    for chunk in reply.opening():
        yield chunk
    for index, stream in enumerate(reply.streams):
        async for piece in stream:
            yield reply.chunk(index, piece)
        yield reply.chunk(index, "", stream.finish)
    if include_usage:
        yield reply.usage_chunk()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
