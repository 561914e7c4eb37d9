"""Request bodies of OpenAI's endpoints.

Explicit nulls count as absent. Unknown fields are ignored, since clients send fields of other services; endpoints of
our own reject them. Known fields whose effect is not supported are rejected: ignoring them would change the answer.

In addition to OpenAI's fields: those of vLLM's server (top_k, min_p, min_tokens, ignore_eos, return_token_ids),
and `depth`, the loops of generated tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from loopwm.records.template import FormatError
from serve.generation.service import DEPTH_RULES, Depth, SamplingParams, depth_rule


class Body(BaseModel):
    """Strict body: ignores unknown fields, converts no types, rejects infinities and NaN."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class OwnBody(Body):
    """Body of an endpoint of our own: rejects unknown fields."""

    model_config = ConfigDict(extra="forbid")


def _body_of(name: str) -> type[Body]:
    """Create the body of an exit rule: its name and its numbers."""
    title, description, numbers = depth_rule(name)
    fields = {field: (kind, ...) for field, kind in numbers.items()}
    definitions: dict[str, Any] = {"__doc__": description, "rule": (Literal[name], ...), **fields}
    return create_model(f"{title}Body", __base__=OwnBody, **definitions)


RULE_BODIES = tuple(_body_of(name) for name in DEPTH_RULES)

if TYPE_CHECKING:
    DepthBody = int | Body
else:
    DepthBody = int | Annotated[Union[RULE_BODIES], Field(discriminator="rule")]  # noqa: UP007 - of a tuple


def depth_of(body: DepthBody | None) -> Depth | None:
    """Return the depth as plain values, or None."""
    return body.model_dump() if isinstance(body, Body) else body


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""List that reports only its first error: reporting a hundred thousand takes seconds."""

MAX_STEPS = 10_000
"""Most messages or steps: validating 20,000 blocks the event loop for a tenth of a second."""

MAX_TOP = 20
"""Most alternatives with log-probabilities per token, as with OpenAI."""

Nothing = Annotated[list[object], Field(max_length=0)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class GenerationBody(Body):
    """Fields of completions and chats. temperature defaults to 0: the most probable observation."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=4, fail_fast=True)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = Field(None, description="never sample the end token")
    return_token_ids: bool | None = None
    depth: DepthBody | None = Field(None, description="loops of generated tokens, or their exit rule")

    # Not supported: only values without an effect are accepted.
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    repetition_penalty: float | None = Field(None, ge=1, le=1)
    use_beam_search: Literal[False] | None = None
    stop_token_ids: Nothing | None = None
    response_format: TextFormat | None = None

    @property
    def choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    def params(self, choice: int) -> SamplingParams:
        """Return the parameters of one of the `n` choices of a prompt; each has a seed of its own."""
        return SamplingParams(
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            max_tokens=self.max_tokens,
            stops=tuple(self.stops),
            min_tokens=self.min_tokens or 0,
            ignore_end=bool(self.ignore_eos),
            logprobs=self.top,
        )

    @property
    def top(self) -> int | None:
        """Number of alternatives per token; None without log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions: one prompt or several, as text or token ids."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]

    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: Top | None = None

    best_of: int | None = Field(None, ge=1, le=1)
    suffix: Literal[""] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Return True if only the prompt is scored, with at most one generated token.

        Raises FormatError for fields that are not supported then.
        """
        if self.max_tokens == 0 and not self.echo:
            raise FormatError("max_tokens", "must be at least 1 without echo, got 0")
        if not self.echo or (self.logprobs is None and self.max_tokens != 0):
            return False
        if self.max_tokens not in (0, 1):
            raise FormatError("max_tokens", f"must be 0 or 1 with echo and logprobs, got {self.max_tokens}")
        if self.choices > 1:
            raise FormatError("n", f"must be 1 with echo and logprobs, got {self.choices}")
        for field in ("stream", "temperature", "stop", "min_tokens", "ignore_eos", "return_token_ids"):
            if getattr(self, field):
                raise FormatError(field, "not supported with echo and logprobs or max_tokens 0")
        return True

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]


class TextPart(Body):
    """Part of a message's text. Those of responses have types of their own."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(Body):
    role: str
    content: str | Items[TextPart]


def read_messages(messages: list[Message]) -> list[tuple[str, str]]:
    """Return messages as (role, text). OpenAI's newer name of the system role is `developer`."""
    contents = [({"developer": "system"}.get(message.role, message.role), message.content) for message in messages]
    return [(role, c if isinstance(c, str) else "".join(part.text for part in c)) for role, c in contents]


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions: system = goal, assistant = observations, user = actions."""

    messages: Annotated[list[Message], Field(max_length=MAX_STEPS, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Top | None = None

    tools: Nothing | None = None
    functions: Nothing | None = None

    @model_validator(mode="after")
    def _newer_name_wins(self) -> Self:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def top(self) -> int | None:
        """Number of alternatives per token. Raises FormatError for `top_logprobs` without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise FormatError("top_logprobs", "requires logprobs: true")
        return self.top_logprobs or 0 if self.logprobs else None


class ResponseBody(GenerationBody):
    """Body of POST /v1/responses: `instructions` = goal, the input's messages as in chats. Nothing is stored."""

    input: str | Annotated[list[Message], Field(max_length=MAX_STEPS, fail_fast=True)]
    instructions: str | None = None
    max_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    metadata: dict[str, str] | None = None
    text: dict[Literal["format"], TextFormat] | None = None
    truncation: Literal["auto"] | None = Field(None, description="the oldest steps are cut to fit the context")
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(None, description="there is no reasoning")

    n: int | None = Field(None, ge=1, le=1)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    reasoning: None = None

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Return the instructions, if any, and the input as messages of a chat."""
        given = [("user", self.input)] if isinstance(self.input, str) else read_messages(self.input)
        return given if self.instructions is None else [("system", self.instructions), *given]


class TokenizeBody(Body):
    """Body of POST /tokenize: a whole prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_STEPS, fail_fast=True)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Items[int]
