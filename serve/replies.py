"""Response bodies in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from serve.prompts import Prompt
from serve.service import TextStream

Json = dict[str, Any]


class Reply:
    """The reply to one request: one choice for each prompt."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, prompts: Sequence[Prompt], streams: Sequence[TextStream]) -> None:
        self.streams = streams
        self._prompts = prompts
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def whole(self, texts: Sequence[str]) -> Json:
        """All at once, after the streams have ended."""
        choices = [self._choice(i, text, self.streams[i].finish) for i, text in enumerate(texts)]
        return {**self._envelope(self.whole_kind), "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, text: str, finish: str | None = None) -> Json:
        return {**self._envelope(self.chunk_kind), "choices": [self._delta(index, text, finish)]}

    def opening(self) -> list[Json]:
        """Chunks before the first text."""
        return []

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that asked for its usage."""
        return {**self._envelope(self.chunk_kind), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        completion = sum(stream.tokens for stream in self.streams)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _envelope(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, text: str, finish: str) -> Json:
        raise NotImplementedError

    def _delta(self, index: int, text: str, finish: str | None) -> Json:
        raise NotImplementedError


class CompletionReply(Reply):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, text: str, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    _delta = _choice


class ChatReply(Reply):
    """`steps_cut` is ours: how many old steps of the chat were dropped because it exceeded the context limit."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._envelope(self.chunk_kind), "choices": [choice]}]

    def _envelope(self, kind: str) -> Json:
        return {**super()._envelope(kind), "steps_cut": self._prompts[0].steps_cut}

    def _choice(self, index: int, text: str, finish: str) -> Json:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def _delta(self, index: int, text: str, finish: str | None) -> Json:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
