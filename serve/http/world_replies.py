"""What world sessions answer, as the description of the API tells it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


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


class Transition(BaseModel):
    """reward: points. continuation: the chance that the world goes on. observation: null where it was not decoded."""

    action: str
    reward: float | None
    continuation: float | None
    loops: int
    summary: list[float] | None
    observation: str | None
    finish_reason: Literal["stop", "length"] | None
    tokens: list[dict[str, Any]] | None = None
    uncertainty: dict[str, float | None] | None = None


class StepTold(BaseModel):
    id: str
    object: Literal["world.step"]
    steps: list[Transition]
    usage: dict[str, Any]
    world: WorldTold


class Answer(BaseModel):
    """status: what it would have had alone. body: a world, a step, a deletion or an error."""

    status: int
    body: dict[str, Any]


class BatchTold(BaseModel):
    """One answer for each request, in their order."""

    object: Literal["world.batch"]
    data: list[Answer]
