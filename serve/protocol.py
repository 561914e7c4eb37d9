"""OpenAI's request and response bodies, as far as this service speaks them.

Explicit nulls count as absent and unknown fields are ignored. Known fields whose effect is not offered are refused,
because ignoring them would answer another question than the one asked.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopwm.text.format import FormatError
from serve.sampling import Sampling


class Body(BaseModel):
    model_config = ConfigDict(strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """What both kinds of request have in common. temperature defaults to 0: the most probable observation."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    max_tokens: int | None = Field(None, ge=1)

    # Not offered: only what asks for nothing is taken.
    n: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)

    @property
    def sampling(self) -> Sampling:
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(self.temperature or 0.0, top_p, self.seed)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """POST /v1/completions: one prompt or several, as text or as token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]

    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for, which is all that `echo` and `logprobs` offer.

        Raises FormatError for a combination that is not offered.
        """
        if not self.echo and self.logprobs is None:
            if self.max_tokens == 0:
                raise FormatError("max_tokens", "must be at least 1; 0 is for echo")
            return False
        if not self.echo:
            raise FormatError("logprobs", "offered with echo alone")
        if self.logprobs is None:
            raise FormatError("echo", "offered with logprobs 0 or 1 alone")
        if self.max_tokens not in (0, 1):
            raise FormatError("max_tokens", "must be 0 or 1 with echo")
        for field in ("stream", "temperature", "stop"):
            if getattr(self, field):
                raise FormatError(field, "not offered with echo")
        return True

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions: system = goal, assistant = observations, user = actions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, ge=1)

    tools: Annotated[list[object], Field(max_length=0)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    @model_validator(mode="after")
    def _newer_name_wins(self) -> Self:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self
