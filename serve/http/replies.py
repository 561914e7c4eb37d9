"""Response bodies in OpenAI's shapes, whole and in chunks, and how they are sent."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from statistics import fmean
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response

from serve.generation.prompts import Prompt
from serve.generation.service import Service
from serve.generation.streams import Scores, TextDelta, TextStream, Token, cancel, interleaved, together
from serve.http.bodies import GenerationBody
from serve.http.sse import EventStream

Json = dict[str, Any]


def envelope(prefix: str, kind: str, model: str) -> Json:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, completion: int, loops: Sequence[int]) -> Json:
    """Tokens; and `loops`, ours: the mean behind generated tokens and end marks, None where there are none."""
    mean = fmean(loops) if loops else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "loops": mean,
    }


class Reply:
    """The reply to one request: `choices` of them for each prompt, by turns of prompts.

    scored: with log-probabilities; ids: with token ids.
    """

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, service: Service, prompts: Sequence[Prompt], streams: Sequence[TextStream], *, scored: bool, ids: bool
    ) -> None:
        self.streams = streams
        self._service = service
        self._prompts = prompts
        self._scored, self._ids = scored, ids
        self._base = envelope(self.prefix, self.whole_kind, service.card.name)
        self._told_loops: list[int] = []

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """All at once, after the streams have ended."""
        choices = [self._whole_choice(i, some) for i, some in enumerate(deltas)]
        return {**self._envelope(self.whole_kind), "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, delta: TextDelta, finish: str | None = None) -> Json:
        self._told_loops += [token.loops for token in delta.tokens]
        choice = {"index": index, **self._delta(delta), **self._common(delta.tokens, finish)}
        return {**self._envelope(self.chunk_kind), "choices": [choice]}

    def opening(self) -> list[Json]:
        """Chunks before the first text."""
        return []

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that asked for its usage."""
        return {**self._envelope(self.chunk_kind), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """After the streams have ended."""
        loops = [loops for stream in self.streams for loops in stream.loops]
        return usage(self._prompt_tokens, sum(stream.tokens for stream in self.streams), loops)

    def usage_so_far(self) -> Json:
        """Of the chunks made so far."""
        return usage(self._prompt_tokens, len(self._told_loops), self._told_loops)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._prompts)

    def _envelope(self, kind: str) -> Json:
        return {**self._base, "object": kind}

    def _prompt(self, index: int) -> Prompt:
        """That a choice goes on from."""
        return self._prompts[index * len(self._prompts) // len(self.streams)]

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        whole = TextDelta("".join(delta.text for delta in deltas), tuple(token for p in deltas for token in p.tokens))
        return {"index": index, **self._text(whole), **self._common(whole.tokens, self.streams[index].finish)}

    def _common(self, tokens: Sequence[Token], finish: str | None) -> Json:
        told: Json = {"logprobs": self._logprobs(tokens) if self._scored else None, "finish_reason": finish}
        if self._ids:
            told["token_ids"] = [token.id for token in tokens]
        return told

    def _text(self, delta: TextDelta) -> Json:
        raise NotImplementedError

    def _delta(self, delta: TextDelta) -> Json:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        raise NotImplementedError


class CompletionReply(Reply):
    """echo: the text begins with the prompt."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        streams: Sequence[TextStream],
        *,
        scored: bool,
        ids: bool,
        echo: bool,
    ) -> None:
        super().__init__(service, prompts, streams, scored=scored, ids=ids)
        self._echo = echo

    def opening(self) -> list[Json]:
        return [self._first(index) for index in range(len(self.streams))] if self._echo or self._ids else []

    def _first(self, index: int) -> Json:
        chunk = self.chunk(index, TextDelta(self._head(index), ()))
        chunk["choices"][0].update(self._prompt_ids(index))
        return chunk

    def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        choice = super()._whole_choice(index, deltas)
        return {**choice, "text": self._head(index) + choice["text"], **self._prompt_ids(index)}

    def _head(self, index: int) -> str:
        return "".join(self._service.token_texts(self._prompt(index).ids)) if self._echo else ""

    def _prompt_ids(self, index: int) -> Json:
        return {"prompt_token_ids": list(self._prompt(index).ids)} if self._ids else {}

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
    """`steps_cut` is ours: how many old steps of the chat were dropped because it exceeded the context limit."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, **self._common((), None)} for i in range(len(self.streams))]
        return [{**self._envelope(self.chunk_kind), **self._prompt_ids(), "choices": [choice]} for choice in choices]

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        return {**super().whole(deltas), **self._prompt_ids()}

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": list(self._prompts[0].ids)} if self._ids else {}

    def _envelope(self, kind: str) -> Json:
        return {**super()._envelope(kind), "steps_cut": self._prompts[0].steps_cut}

    def _text(self, delta: TextDelta) -> Json:
        return {"message": {"role": "assistant", "content": delta.text}}

    def _delta(self, delta: TextDelta) -> Json:
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        return {"content": [self._scored_token(token) for token in tokens], "refusal": None}

    def _scored_token(self, token: Token) -> Json:
        scores = _scores(token)
        tops = [self._told(*top) for top in scores.top]
        return {**self._told(token.id, scores.chosen), "top_logprobs": tops}

    def _told(self, token: int, score: float) -> Json:
        (text,) = self._service.single_texts([token])
        return {"token": text, "logprob": score, "bytes": list(self._service.token_bytes(token))}


def top_texts(service: Service, tops: Sequence[Sequence[tuple[int, float]]]) -> list[dict[str, float]] | None:
    """Texts of the most probable tokens with their scores, place by place; None where none were asked for.

    Of tokens with the same text, parts of characters, the most probable stays.
    """
    if not any(tops):
        return None
    return [_top_texts(service, top) for top in tops]


def _top_texts(service: Service, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    texts = service.single_texts([token for token, _ in top])
    told: dict[str, float] = {}
    for text, (_, score) in zip(texts, top, strict=True):
        told.setdefault(text, score)
    return told


def _scores(token: Token) -> Scores:
    assert token.scores is not None
    return token.scores


async def answer(reply: Reply, body: GenerationBody) -> Response:
    """The reply as its request asks for it: whole, or in events as it comes."""
    if body.stream:
        return EventStream(_events(reply, body), lambda: cancel(reply.streams))
    try:
        deltas = await together([stream.deltas() for stream in reply.streams])
    finally:
        cancel(reply.streams)
    return JSONResponse(reply.whole(deltas))


async def _events(reply: Reply, body: GenerationBody) -> AsyncIterator[Json]:
    async for chunk in _chunks(reply):
        told = {"usage": reply.usage_so_far()} if body.continuous_usage else {}
        yield {**chunk, **told}
    if body.include_usage:
        yield reply.usage_chunk()


async def _chunks(reply: Reply) -> AsyncIterator[Json]:
    for chunk in reply.opening():
        yield chunk
    async for index, delta in interleaved(reply.streams):
        if delta is None:
            yield reply.chunk(index, TextDelta("", ()), reply.streams[index].finish)
        elif delta.text or delta.tokens:
            yield reply.chunk(index, delta)
