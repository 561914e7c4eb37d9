"""OpenAI's responses, without what needs storage: one message of text, whole or as server-sent events."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

from pydantic import BaseModel, Field

from loopwm.records.template import ContextTooLongError, FormatError
from serve.generation.prompts import Prompt
from serve.generation.service import CompletionTooLongError
from serve.generation.streams import Finish, TextStream
from serve.http.bodies import ResponseBody
from serve.http.replies import FOREIGN, Json, usage

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of a message. annotations, logprobs: always empty."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = Field(default_factory=list)
    logprobs: list[str] = Field(default_factory=list)


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class ResponseUsage(BaseModel):
    """Token counts. Clients need the details: cached tokens are not counted, and nothing reasons."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    loops: float | None
    input_tokens_details: dict[str, int] = Field(default_factory=lambda: {"cached_tokens": 0, "cache_write_tokens": 0})
    output_tokens_details: dict[str, int] = Field(default_factory=lambda: {"reasoning_tokens": 0})


class ResponseObject(BaseModel):
    """Response. steps_cut, warnings: as of a chat. status: incomplete if `max_output_tokens` cut its text."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status = "in_progress"
    output: list[OutputMessage] = Field(default_factory=list)
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    error: None = None
    metadata: dict[str, str] | None
    tools: list[str] = Field(default_factory=list)
    tool_choice: Literal["none"] = "none"
    parallel_tool_calls: Literal[False] = False
    steps_cut: int
    warnings: list[str]


@contextmanager
def naming_fields(body: ResponseBody) -> Iterator[None]:
    """Name the fields of this body in errors of a chat."""
    before = 0 if body.instructions is None else 1
    try:
        yield
    except (FormatError, CompletionTooLongError) as error:
        too_long = isinstance(error, (ContextTooLongError, CompletionTooLongError))
        kind = ContextTooLongError if too_long else type(error)
        field, _, message = str(error).partition(": ")
        field = re.sub(r"(?<=\[)\d+", lambda index: str(int(index[0]) - before), field.replace("messages", "input"))
        raise kind(field.replace("max_tokens", "max_output_tokens"), message) from error


class ResponseReply:
    """Reply to one request. Its stream is iterated once."""

    def __init__(self, model: str, prompt: Prompt, stream: TextStream, body: ResponseBody) -> None:
        self._prompt, self._stream = prompt, stream
        self._message = OutputMessage(id=f"msg_{uuid.uuid4().hex}")
        self._started = ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=model,
            metadata=body.metadata,
            steps_cut=prompt.steps_cut,
            warnings=[FOREIGN] * prompt.foreign,
        )

    async def whole(self) -> Json:
        return self._whole(await self._stream.text())

    def _whole(self, text: str) -> Json:
        """Return the response with its text, after the stream has ended."""
        cut = self._stream.finish is Finish.LENGTH
        status = "incomplete" if cut else "completed"
        counts = usage(len(self._prompt.ids), self._stream.tokens, self._stream.loops)
        changes = {
            "status": status,
            "output": [self._message.model_copy(update={"status": status, "content": [OutputText(text=text)]})],
            "usage": ResponseUsage(
                input_tokens=counts["prompt_tokens"], output_tokens=counts["completion_tokens"], **counts
            ),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }
        return self._started.model_copy(update=changes).model_dump()

    async def events(self) -> AsyncIterator[Json]:
        numbers, started, text = count(), self._started.model_dump(), ""
        part = {"content_index": 0, "item_id": self._message.id}

        def event(kind: str, **fields: Any) -> Json:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), "output_index": 0, **fields}

        yield event("created", response=started)
        yield event("in_progress", response=started)
        yield event("output_item.added", item=self._message.model_dump())
        yield event("content_part.added", **part, part=OutputText(text="").model_dump())
        async for delta in self._stream:
            text += delta.text
            if delta.text:
                yield event("output_text.delta", **part, delta=delta.text, logprobs=[])
        whole = self._whole(text)
        (message,) = whole["output"]
        yield event("output_text.done", **part, text=text, logprobs=[])
        yield event("content_part.done", **part, part=message["content"][0])
        yield event("output_item.done", item=message)
        yield event(whole["status"], response=whole)
