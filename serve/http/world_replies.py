"""What world sessions answer, as the description of the API tells it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from serve.http.errors import ErrorBody


class WorldTold(BaseModel):
    """steps_cut: old steps dropped to fit the context limit. tokens: of the world as it is. expires_in: seconds without
    use."""

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


class WorldList(BaseModel):
    object: Literal["list"]
    data: list[WorldTold]


class TokenTold(BaseModel):
    """logprob: null where none was asked for."""

    token: str
    logprob: float | None
    loops: int


class Uncertainty(BaseModel):
    """Nats: the mean of an observation's tokens and its end, and the end's own, null where it did not come."""

    observation: float
    end: float | None


class Transition(BaseModel):
    """reward: points. continuation: the chance that the world goes on. observation: null where it was not decoded."""

    action: str
    reward: float | None
    continuation: float | None
    loops: int
    summary: list[float] | None
    observation: str | None
    finish_reason: Literal["stop", "length"] | None
    tokens: list[TokenTold] = Field(default_factory=list, description="with `logprobs`")
    uncertainty: Uncertainty | None = None


class MeanLoops(BaseModel):
    """Of transitions, and of decoded tokens with their ends."""

    advance: float
    decode: float | None


class StepUsage(BaseModel):
    completion_tokens: int
    loops: MeanLoops


class StepTold(BaseModel):
    id: str
    object: Literal["world.step"]
    steps: list[Transition]
    usage: StepUsage
    world: WorldTold


class Deleted(BaseModel):
    id: str
    object: Literal["world.deleted"]
    deleted: Literal[True]


class CandidateTold(BaseModel):
    """score: expected sum of rewards. rewards and continuations: after each action."""

    score: float
    rewards: list[float]
    continuations: list[float]


class PlanTold(BaseModel):
    """best: the number of the best candidate. observation: that it ends with, null where it was not decoded."""

    id: str
    object: Literal["world.plan"]
    candidates: list[CandidateTold]
    best: int
    observation: str | None


class Answer(BaseModel):
    """status: what it would have had alone. body: a world, a step, a deletion or an error."""

    status: int
    body: WorldTold | StepTold | Deleted | ErrorBody


class BatchTold(BaseModel):
    """One answer for each request, in their order."""

    object: Literal["world.batch"]
    data: list[Answer]
