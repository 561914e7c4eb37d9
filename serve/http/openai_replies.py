"""What OpenAI's and vLLM's routes answer, as the description of the API tells it. The answers themselves are made in
`serve.http.replies` and `serve.http.prompt_logprobs`, and go out as they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


def told_in_events(last: str) -> dict[int | str, dict[str, Any]]:
    """For a route that answers whole or, with `stream`, in parts. last: what they end with before [DONE]."""
    told = f"Whole; with `stream` server-sent events, whose data are JSON: chunks, {last}, and [DONE]"
    return {200: {"description": told, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class ModelTold(BaseModel):
    """max_model_len: tokens of prompt and completion together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelTold]


class Usage(BaseModel):
    """loops: the mean behind generated tokens and end marks, null where there are none."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    loops: float | None


class CompletionLogprobs(BaseModel):
    """An entry a token; the first of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """token_ids, prompt_token_ids: with `return_token_ids`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ScoredToken(BaseModel):
    """bytes: what the token adds to the text, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(BaseModel):
    content: list[ChatToken]
    refusal: None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    """token_ids: with `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default_factory=list)


class ChatCompletion(BaseModel):
    """steps_cut: old steps of the chat that were dropped to fit the context limit. prompt_token_ids: with
    `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    steps_cut: int
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default_factory=list)


class Tokens(BaseModel):
    """token_strs: with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """By Hugging Face's names."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    special_tokens: list[str]
    chat_template: str | None


class Health(BaseModel):
    """running: rows that decode. waiting: requests and other work that wait."""

    status: Literal["ok"]
    running: int
    waiting: int


class Version(BaseModel):
    version: str
