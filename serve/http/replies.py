"""Response bodies in OpenAI's format, whole and in chunks as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from statistics import fmean
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve.generation.prompts import Prompt
from serve.generation.service import Service
from serve.generation.streams import Scores, TextDelta, TextStream, Token, interleaved, together
from serve.http import errors
from serve.http.bodies import CompletionBody, GenerationBody

log = logging.getLogger(__name__)

FOREIGN = "goal and observation are worded unlike all training data: expect wrong answers (cure: loopwm train LOGS)"

Json = dict[str, Any]


def envelope(prefix: str, kind: str, model: str) -> Json:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, completion: int, loops: Sequence[int]) -> Json:
    """Return token counts, and the mean loops of generated tokens and end tokens (our extension)."""
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**tokens, "loops": fmean(loops) if loops else None}


class Reply:
    """Reply to one request, with the same number of choices for each prompt."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, service: Service, prompts: Sequence[Prompt], streams: Sequence[TextStream], body: GenerationBody
    ) -> None:
        """Create a reply. streams: choices, ordered by prompt."""
        self.body = body
        self.streams = streams
        self._service = service
        self._prompts = prompts
        self._scored, self._ids = body.top is not None, bool(body.return_token_ids)
        self._base = envelope(self.prefix, self.whole_kind, service.card.name)
        self._emitted_loops: list[int] = []

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """Return the whole reply, after the streams have ended."""
        choices = [self._whole_choice(i, each) for i, each in enumerate(deltas)]
        return {**self._envelope(self.whole_kind), "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, delta: TextDelta, finish: str | None = None) -> Json:
        self._emitted_loops += [token.loops for token in delta.tokens]
        choice = {"index": index, **self._delta(delta), **self._common(delta.tokens, finish)}
        return {**self._envelope(self.chunk_kind), "choices": [choice]}

    def opening(self) -> list[Json]:
        """Return the chunks before the first text."""
        return []

    def usage_chunk(self) -> Json:
        """Return the last chunk of a stream with usage."""
        return {**self._envelope(self.chunk_kind), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """Return the usage, after the streams have ended."""
        loops = [loops for stream in self.streams for loops in stream.loops]
        return usage(self._prompt_tokens, sum(stream.tokens for stream in self.streams), loops)

    def usage_so_far(self) -> Json:
        """Return the usage of the chunks sent so far."""
        return usage(self._prompt_tokens, len(self._emitted_loops), self._emitted_loops)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._prompts)

    def _envelope(self, kind: str) -> Json:
        return {**self._base, "object": kind}

    def _prompt(self, index: int) -> Prompt:
        """Return the prompt of choice `index`."""
        return self._prompts[index * len(self._prompts) // len(self.streams)]

    def _prompt_ids(self, index: int = 0) -> Json:
        return {"prompt_token_ids": list(self._prompt(index).ids)} if self._ids else {}

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        whole = TextDelta("".join(delta.text for delta in deltas), tuple(token for p in deltas for token in p.tokens))
        return {"index": index, **self._text(whole), **self._common(whole.tokens, self.streams[index].finish)}

    def _common(self, tokens: Sequence[Token], finish: str | None) -> Json:
        fields: Json = {"logprobs": self._logprobs(tokens) if self._scored else None, "finish_reason": finish}
        if self._ids:
            fields["token_ids"] = [token.id for token in tokens]
        return fields

    def _text(self, delta: TextDelta) -> Json:
        raise NotImplementedError

    def _delta(self, delta: TextDelta) -> Json:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        raise NotImplementedError


class CompletionReply(Reply):
    """Reply to a completion; the text begins with the prompt if the body has `echo`."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def opening(self) -> list[Json]:
        return [self._first(index) for index in range(len(self.streams))] if self.body.echo or self._ids else []

    def _first(self, index: int) -> Json:
        chunk = self.chunk(index, TextDelta(self._echoed(index), ()))
        chunk["choices"][0].update(self._prompt_ids(index))
        return chunk

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        choice = super()._whole_choice(index, deltas)
        return {**choice, "text": self._echoed(index) + choice["text"], **self._prompt_ids(index)}

    def _echoed(self, index: int) -> str:
        return "".join(self._service.token_texts(self._prompt(index).ids)) if self.body.echo else ""

    def _text(self, delta: TextDelta) -> Json:
        return {"text": delta.text}

    _delta = _text

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        texts = self._service.single_texts([token.id for token in tokens])
        scores = [_scores(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [score.chosen for score in scores],
            "top_logprobs": top_texts(self._service, [score.top for score in scores]),
            "text_offset": [token.start for token in tokens],
        }


class ChatReply(Reply):
    """Reply to a chat. Adds `steps_cut`, oldest steps of the chat, dropped to fit the context, and `warnings`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, **self._common((), None)} for i in range(len(self.streams))]
        return [{**self._envelope(self.chunk_kind), **self._prompt_ids(), "choices": [choice]} for choice in choices]

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        return {**super().whole(deltas), **self._prompt_ids()}

    def _envelope(self, kind: str) -> Json:
        prompt = self._prompts[0]
        return {**super()._envelope(kind), "steps_cut": prompt.steps_cut, "warnings": [FOREIGN] * prompt.foreign}

    def _text(self, delta: TextDelta) -> Json:
        return {"message": {"role": "assistant", "content": delta.text}}

    def _delta(self, delta: TextDelta) -> Json:
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        return {"content": [self._scored_token(token) for token in tokens], "refusal": None}

    def _scored_token(self, token: Token) -> Json:
        scores = _scores(token)
        tops = [self._token_score(*top) for top in scores.top]
        return {**self._token_score(token.id, scores.chosen), "top_logprobs": tops}

    def _token_score(self, token: int, score: float) -> Json:
        (text,) = self._service.single_texts([token])
        return {"token": text, "logprob": score, "bytes": list(self._service.token_bytes(token))}


def top_texts(service: Service, tops: Sequence[Sequence[tuple[int, float]]]) -> list[dict[str, float]] | None:
    """Return texts and scores of the alternatives at each position; None if none were requested.

    Of tokens with the same text (parts of characters), the most probable is kept.
    """
    if not any(tops):
        return None
    rows: list[dict[str, float]] = []
    for top in tops:
        rows.append({})
        for text, (_, score) in zip(service.single_texts([token for token, _ in top]), top, strict=True):
            rows[-1].setdefault(text, score)
    return rows


def _scores(token: Token) -> Scores:
    assert token.scores is not None
    return token.scores


async def respond(reply: Reply) -> Response:
    """Respond with the whole reply, or with events if the body has `stream`."""
    if reply.body.stream:
        return event_stream(_events(reply))
    deltas = await together([stream.deltas() for stream in reply.streams])
    return await asyncio.to_thread(lambda: JSONResponse(reply.whole(deltas)))  # megabytes with log-probabilities


async def _events(reply: Reply) -> AsyncIterator[Json]:
    async for chunk in _chunks(reply):
        yield {**chunk, "usage": reply.usage_so_far()} if reply.body.continuous_usage else chunk
    if reply.body.include_usage:
        yield reply.usage_chunk()


async def _chunks(reply: Reply) -> AsyncIterator[Json]:
    for chunk in reply.opening():
        yield chunk
    async for index, delta in interleaved(reply.streams):
        if delta is None:
            yield reply.chunk(index, TextDelta("", ()), reply.streams[index].finish)
        elif delta.text or delta.tokens:
            yield reply.chunk(index, delta)


def event_stream(data: AsyncIterator[Json]) -> StreamingResponse:
    """Return a response of one event per object, then [DONE]."""
    return StreamingResponse(_lines(data), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _lines(data: AsyncIterator[Json]) -> AsyncIterator[str]:
    try:
        async for item in data:
            yield _event(item)
    except Exception as error:  # the status line has been sent: the error becomes an event
        if not isinstance(error, errors.EXPECTED):
            log.exception("a stream failed")
        yield _event(errors.problem_of(error).envelope())
    yield "data: [DONE]\n\n"


def _event(item: Json) -> str:
    name = f"event: {item['type']}\n" if "type" in item else ""
    return f"{name}data: {json.dumps(item)}\n\n"  # ASCII: some clients split lines at U+2028 and U+0085, too
