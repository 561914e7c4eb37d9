"""Tokenizer endpoints in the format of vLLM's server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from loopwm.records.template import FormatError
from serve.generation.prompts import Prompt
from serve.generation.service import Service
from serve.http.bodies import DetokenizeBody, TokenizeBody, read_messages
from serve.http.openai_replies import Detokenized, TokenizerInfo, Tokens
from serve.http.routes import Serving

router = APIRouter()


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeBody, service: Serving) -> dict[str, Any]:
    _check_model(body.model, service)
    ids = list((await asyncio.to_thread(lambda: _read(body, service))).ids)
    texts = service.single_texts(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.card.max_length, "tokens": ids, "token_strs": texts}


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeBody, service: Serving) -> dict[str, str]:
    _check_model(body.model, service)
    service.prompts.check_ids("tokens", body.tokens)
    return {"prompt": service.decode(body.tokens)}


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(service: Serving) -> dict[str, Any]:
    return service.tokenizer_info()


def _check_model(name: str | None, service: Service) -> None:
    if name is not None:
        service.check_model(name)


def _read(body: TokenizeBody, service: Service) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise FormatError("prompt", "exactly one of prompt and messages is required")
    if body.messages is not None:
        return service.prompts.chat(read_messages(body.messages))
    return Prompt(tuple(service.prompts.encode(body.prompt or "")))
