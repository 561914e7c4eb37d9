"""Response schemas of OpenAI's and vLLM's endpoints and of world sessions, for the API description.

The responses are created in `serve.http.replies` and `serve.http.prompt_logprobs` and are not validated again.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from serve.http.errors import ErrorBody

FinishReason = Literal["stop", "length"]


def stream_responses(last: str) -> dict[int | str, dict[str, Any]]:
    """Describe the responses of an endpoint with `stream`.

    last: the last event before [DONE].
    """
    text = f"The whole reply; with `stream` server-sent events with JSON data: chunks, {last}, and [DONE]"
    return {200: {"description": text, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class ModelInfo(BaseModel):
    """Model of this service. max_model_len: most tokens of prompt and completion together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelInfo]


class Usage(BaseModel):
    """Token counts. loops: mean of generated tokens and end tokens, null if there are none."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    loops: float | None


class CompletionLogprobs(BaseModel):
    """One entry per token; the first of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Choice of a completion. token_ids, prompt_token_ids: with `return_token_ids`."""

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
    """Token with its log-probability. bytes: of its text, which may be a part of a character."""

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
    """Choice of a chat. token_ids: with `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default_factory=list)


class ChatCompletion(BaseModel):
    """Chat completion.

    steps_cut: oldest steps of the chat, dropped to fit the context.
    warnings: reasons to expect wrong answers.
    prompt_token_ids: with `return_token_ids`.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    steps_cut: int
    warnings: list[str]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default_factory=list)


class Tokens(BaseModel):
    """Tokens of a text. token_strs: with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    """Load of the engine. running: requests that decode. waiting: other work items."""

    status: Literal["ok"]
    running: int
    waiting: int


class Version(BaseModel):
    version: str


class WorldInfo(BaseModel):
    """World session.

    steps_cut: oldest steps, dropped to fit the context.
    tokens: of the world now.
    expires_in: seconds without use.
    warnings: reasons to expect wrong answers.
    """

    id: str
    object: Literal["world"]
    created: int
    model: str
    imagined_steps: int
    steps_cut: int
    tokens: int
    state_slots: int
    max_loops: int
    expires_in: float
    warnings: list[str]


class Check(BaseModel):
    """Observation imagined for a real step.

    missing: lines it lacks. wrong: lines of it that are not real.
    """

    observation: str
    exact: bool
    missing: list[str]
    wrong: list[str]
    trust: float | None


class Observed(WorldInfo):
    """World after a real step. check: null unless requested."""

    check: Check | None


class WorldList(BaseModel):
    object: Literal["list"]
    data: list[WorldInfo]


class WorldPage(WorldList):
    """Part of a list. has_more: more follow the last one."""

    has_more: bool


class TokenInfo(BaseModel):
    """Token of an observation. logprob: null unless requested."""

    token: str
    logprob: float | None
    loops: int


class Imagined(BaseModel):
    """Imagined outcome of an action.

    reward, expected_reward: the most likely one and the mean, in points.
    continuation: probability that the episode continues.
    acceptance: probability that the action is carried out.
    observation: null if it was not decoded.
    trust: probability of exactly this observation, null unless it was decoded to its end.
    """

    action: str
    reward: float | None
    expected_reward: float | None
    continuation: float | None
    acceptance: float | None
    observation: str | None
    trust: float | None


class Transition(Imagined):
    loops: int
    summary: list[float] | None
    finish_reason: FinishReason | None
    tokens: list[TokenInfo] = Field(default_factory=list, description="with `logprobs`")


class MeanLoops(BaseModel):
    """Mean loops of transitions, and of decoded tokens with their ends."""

    advance: float
    decode: float | None


class StepUsage(BaseModel):
    completion_tokens: int
    loops: MeanLoops


class StepResult(BaseModel):
    id: str
    object: Literal["world.step"]
    steps: list[Transition]
    usage: StepUsage
    world: WorldInfo


class Deleted(BaseModel):
    id: str
    object: Literal["world.deleted"]
    deleted: Literal[True]


class CandidateResult(BaseModel):
    """Score of a plan: expected sum of rewards. rewards, continuations: after each action."""

    score: float
    rewards: list[float]
    continuations: list[float]


class PlanResult(BaseModel):
    """Scores of all candidates. best: index of the best one. observation: at its end, null if not decoded."""

    id: str
    object: Literal["world.plan"]
    candidates: list[CandidateResult]
    best: int
    observation: str | None


class ActionResult(Imagined):
    """Outcome of a candidate.

    accepted: false if the observation refuses it, or acceptance is below one half.
    """

    accepted: bool


class ActionsResult(BaseModel):
    """One result per candidate, in the same order."""

    id: str
    object: Literal["world.actions"]
    data: list[ActionResult]


class Answer(BaseModel):
    """Response to one request of a batch: its status, and a world, a step, a deletion or an error."""

    status: int
    body: Observed | WorldInfo | StepResult | Deleted | ErrorBody


class BatchResult(BaseModel):
    """One response per request, in the same order."""

    object: Literal["world.batch"]
    data: list[Answer]
