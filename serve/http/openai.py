"""OpenAI's API: models, completions and chats, whole or as server-sent events; vLLM's tokenizer endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from loopwm.records.template import FormatError
from serve.generation.prompts import Prompt, PromptReader
from serve.generation.service import RequestContext, Service
from serve.generation.streams import TextStream
from serve.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    ResponseBody,
    TokenizeBody,
    depth_of,
    read_messages,
)
from serve.http.prompt_logprobs import echo_reply
from serve.http.replies import ChatReply, CompletionReply, event_stream, respond
from serve.http.responses import ResponseObject, ResponseReply, naming_fields
from serve.http.routes import Admitted, Serving
from serve.http.schemas import ChatCompletion, Completion, Detokenized, ModelInfo, ModelList, Tokens, stream_responses

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
async def list_models(service: Serving) -> dict[str, Any]:
    return {"object": "list", "data": [_model_object(service, name) for name in service.card.names]}


@router.get("/v1/models/{name:path}", response_model=ModelInfo)
async def show_model(name: str, service: Serving) -> dict[str, Any]:
    service.check_model(name)
    return _model_object(service, name)


@router.post("/v1/completions", response_model=Completion, responses=stream_responses("usage if requested"))
async def completions(body: CompletionBody, service: Serving, ctx: Admitted) -> Response:
    """Complete whole prompts in the template of loopwm/records/template.py, given as text or token ids."""
    service.check_model(body.model)
    most = service.engine.limits.max_batch
    if not 1 <= len(body.prompts) <= most:
        raise FormatError("prompt", f"must be 1 to {most} prompts, got {len(body.prompts)}")
    if body.scores_prompt:
        return await _scored(body, service, ctx)
    prompts = await asyncio.to_thread(lambda: _read(service.prompts, body))
    streams = _start(service, ctx, prompts, body)
    return await respond(CompletionReply(service, prompts, streams, body))


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=stream_responses("usage if requested"))
async def chat_completions(body: ChatBody, service: Serving, ctx: Admitted) -> Response:
    """Imagine the last users' actions. System = goal, assistant = observations, user = actions."""
    service.check_model(body.model)
    prompt = await asyncio.to_thread(lambda: service.prompts.chat(read_messages(body.messages)))
    streams = _start(service, ctx, [prompt], body)
    return await respond(ChatReply(service, [prompt], streams, body))


@router.post("/v1/responses", response_model=ResponseObject, responses=stream_responses("the whole response"))
async def responses(body: ResponseBody, service: Serving, ctx: Admitted) -> Response:
    """Imagine the last users' actions, as in chats, by OpenAI's newer API. Responses are not stored."""
    service.check_model(body.model)
    with naming_fields(body):
        prompt = await asyncio.to_thread(lambda: service.prompts.chat(body.messages))
        (stream,) = _start(service, ctx, [prompt], body)
    reply = ResponseReply(service.card.name, prompt, stream, body)
    return event_stream(reply.events()) if body.stream else JSONResponse(await reply.whole())


def _model_object(service: Service, name: str) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": service.card.created, "owned_by": "loopwm"}
    return {**model, "max_model_len": service.card.max_length}


async def _scored(body: CompletionBody, service: Service, ctx: RequestContext) -> Response:
    generated = body.max_tokens or 0
    reader = replace(service.prompts, limit=service.card.max_length - generated)
    prompts = await asyncio.to_thread(lambda: _read(reader, body))
    rule = service.rule(depth_of(body.depth))
    scores = await service.score(ctx, prompts, rule, body.top or 0)
    reply = partial(echo_reply, generated=generated, top=body.top, loops=rule.limit)
    return await asyncio.to_thread(lambda: JSONResponse(reply(service, prompts, scores)))


def _read(reader: PromptReader, body: CompletionBody) -> list[Prompt]:
    return [reader.text(prompt) if isinstance(prompt, str) else reader.ids(prompt) for prompt in body.prompts]


def _start(service: Service, ctx: RequestContext, prompts: Sequence[Prompt], body: GenerationBody) -> list[TextStream]:
    """Queue all choices of all prompts of a request."""
    most, count = service.engine.limits.max_batch, len(prompts) * body.choices
    if count > most:
        raise FormatError("n", f"must be at most {most} choices of all prompts together, got {count}")
    choices = [body.params(choice) for choice in range(body.choices)]
    depth = depth_of(body.depth)
    return [stream for prompt in prompts for stream in service.start(ctx, prompt, depth, choices)]


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeBody, service: Serving, ctx: Admitted) -> dict[str, Any]:
    service.check_model(body.model)
    ids = list((await asyncio.to_thread(lambda: _read_text(body, service))).ids)
    texts = service.single_texts(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.card.max_length, "tokens": ids, "token_strs": texts}


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeBody, service: Serving, ctx: Admitted) -> dict[str, str]:
    service.check_model(body.model)
    service.prompts.check_ids("tokens", body.tokens)
    return {"prompt": service.decode(body.tokens)}


def _read_text(body: TokenizeBody, service: Service) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise FormatError("prompt", "exactly one of prompt and messages is required")
    if body.messages is not None:
        return service.prompts.chat(read_messages(body.messages))
    return Prompt(tuple(service.prompts.encode(body.prompt or "")))
