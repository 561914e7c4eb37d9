"""Response schemas of world sessions, for the API description."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from serve.http.errors import ErrorBody


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


class WorldList(BaseModel):
    object: Literal["list"]
    data: list[WorldInfo]


class TokenInfo(BaseModel):
    """Token of an observation. logprob: null unless requested."""

    token: str
    logprob: float | None
    loops: int


class Transition(BaseModel):
    """Imagined step.

    reward: in points.
    continuation: probability that the episode continues.
    observation: null if it was not decoded.
    trust: probability of exactly this observation, null unless it was decoded to its end.
    """

    action: str
    reward: float | None
    continuation: float | None
    loops: int
    summary: list[float] | None
    observation: str | None
    finish_reason: Literal["stop", "length"] | None
    trust: float | None
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


class ActionResult(BaseModel):
    """Imagined outcome of an action.

    accepted: false if the observation says that it was not carried out.
    reward, expected_reward: the most likely one and the mean, in points.
    continuation: probability that the episode continues.
    trust: probability of exactly this observation, null unless it was decoded to its end.
    """

    action: str
    accepted: bool
    observation: str
    reward: float | None
    expected_reward: float | None
    continuation: float | None
    trust: float | None


class ActionsResult(BaseModel):
    """One result per candidate, in the same order."""

    id: str
    object: Literal["world.actions"]
    data: list[ActionResult]


class Answer(BaseModel):
    """Response to one request of a batch: its status, and a world, a step, a deletion or an error."""

    status: int
    body: WorldInfo | StepResult | Deleted | ErrorBody


class BatchResult(BaseModel):
    """One response per request, in the same order."""

    object: Literal["world.batch"]
    data: list[Answer]
