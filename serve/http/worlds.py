"""World sessions over HTTP: what a chat API cannot say."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from statistics import mean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, Field

from loopwm.records.template import Context, Transition
from serve.generation.service import DEFAULT_MAX_TOKENS, RequestContext
from serve.generation.streams import Finish, TextDelta, together
from serve.http.bodies import DepthBody, Items, OwnBody, depth_of
from serve.http.errors import EXPECTED, problem_of
from serve.http.openai_replies import told_in_events
from serve.http.routes import Admitted, CancelledWithClient, Owner
from serve.http.sse import EventStream
from serve.http.world_replies import BatchTold, Deleted, PlanTold, StepTold, WorldList, WorldTold
from serve.worlds.sessions import (
    MAX_ACTIONS,
    MAX_CANDIDATES,
    MAX_IMAGINED,
    Decode,
    Imagined,
    PendingStep,
    Sessions,
    Step,
    StepRequest,
)
from serve.worlds.store import Session

log = logging.getLogger(__name__)

MAX_BATCH = 256
"""Most requests of a batch."""

Json = dict[str, Any]
Action = Annotated[str, Field(min_length=1, max_length=2000, pattern=r"\S")]
Actions = Annotated[list[Action], Field(min_length=1, max_length=MAX_ACTIONS, fail_fast=True)]

router = APIRouter(prefix="/v1/worlds", route_class=CancelledWithClient)


class StepTaken(OwnBody):
    action: Action
    observation: str


class WorldBody(OwnBody):
    """observation: the first one, or the one now if there is no history. depth: loops of every pass, or a rule.
    actions: imagined since, and steps_cut: steps that were dropped before, as an exported world has them."""

    model: str
    goal: str
    observation: str
    history: Items[StepTaken] | None = None
    look: str | None = None
    inventory: str | None = None
    hidden_state: str | None = None
    depth: DepthBody | None = None
    actions: Annotated[list[Action], Field(max_length=MAX_IMAGINED, fail_fast=True)] | None = None
    steps_cut: int | None = Field(None, ge=0, lt=2**31)

    def context(self) -> Context:
        steps = tuple(Transition(step.action, step.observation) for step in self.history or ())
        return Context(self.goal, self.observation, steps, self.look, self.inventory, self.hidden_state)


class StepBody(OwnBody):
    actions: Action | Actions
    decode: Decode | None = None
    max_tokens: int | None = Field(None, ge=1)
    monitor: bool | None = None
    logprobs: bool | None = Field(None, description="tell each token of an observation")
    uncertainty: bool | None = Field(None, description="tell mean negative log-probabilities")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    step_id: str | None = Field(None, min_length=1, max_length=200, description="asked for again, it is taken once")
    stream: bool | None = None

    @property
    def request(self) -> StepRequest:
        return StepRequest(
            [self.actions] if isinstance(self.actions, str) else self.actions,
            self.decode or "last",
            self.max_tokens or DEFAULT_MAX_TOKENS,
            monitor=bool(self.monitor),
            scored=bool(self.logprobs or self.uncertainty),
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            step_id=self.step_id,
        )


class ObserveBody(OwnBody):
    action: Action
    observation: str


class ForkBody(OwnBody):
    count: int = Field(1, ge=1, le=MAX_CANDIDATES)


class PlanBody(OwnBody):
    candidates: Annotated[list[Actions], Field(min_length=1, max_length=MAX_CANDIDATES, fail_fast=True)]
    decode: bool | None = None
    max_tokens: int | None = Field(None, ge=1)


class BatchCreate(WorldBody):
    op: Literal["create"]


def _not_streamed(stream: bool) -> bool:
    """Raises ValueError. A Literal[False] would take 0, too."""
    if stream:
        raise ValueError("a batch is not streamed")
    return stream


class BatchStep(StepBody):
    op: Literal["step"]
    world: str
    stream: Annotated[bool, AfterValidator(_not_streamed), Field(json_schema_extra={"const": False})] | None = None


class BatchObserve(ObserveBody):
    op: Literal["observe"]
    world: str


class BatchDelete(OwnBody):
    op: Literal["delete"]
    world: str


BatchItem = Annotated[BatchCreate | BatchStep | BatchObserve | BatchDelete, Field(discriminator="op")]


class BatchBody(OwnBody):
    """Requests for different worlds, which are worked on side by side."""

    requests: Annotated[list[BatchItem], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


async def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


Worlds = Annotated[Sessions, Depends(_sessions)]


@router.post("", status_code=201, response_model=WorldTold)
async def create(body: WorldBody, worlds: Worlds, ctx: Admitted) -> Json:
    """A world from a goal, what was seen and, where there are any, earlier steps."""
    return await _create(body, worlds, ctx)


async def _create(body: WorldBody, worlds: Sessions, ctx: RequestContext) -> Json:
    worlds.service.check_model(body.model)
    depth = depth_of(body.depth)
    context = await worlds.service.read(body.context)
    session = await worlds.create(ctx, context, depth, body.actions or (), body.steps_cut or 0)
    return _world(session, worlds)


@router.get("", response_model=WorldList)
async def list_worlds(worlds: Worlds, owner: Owner) -> Json:
    """One's own worlds, the most recently used last."""
    return _list(worlds.store.of(owner), worlds)


@router.get("/{name}", response_model=WorldTold)
async def show(name: str, worlds: Worlds, owner: Owner) -> Json:
    """A world as it is now."""
    return _world(worlds.store.get(name, owner), worlds)


@router.get("/{name}/export", responses={200: {"model": WorldBody}})
async def export(name: str, worlds: Worlds, owner: Owner) -> Response:
    """All that a world is, as text: the body of a request that creates it again, here or elsewhere."""
    return JSONResponse({"model": worlds.service.card.name, **worlds.store.get(name, owner).log.json()})


@router.delete("/{name}", response_model=Deleted)
async def delete(name: str, worlds: Worlds, owner: Owner) -> Json:
    """The world is gone, and its memory is free."""
    await worlds.remove(owner, name)
    return {"id": name, "object": "world.deleted", "deleted": True}


@router.post("/{name}/step", response_model=StepTold, responses=told_in_events("the whole step"))
async def step(name: str, body: StepBody, worlds: Worlds, ctx: Admitted) -> Response:
    """One action or several; the observations asked for by `decode` are written out, whole or as server-sent events."""
    if not body.stream:
        return JSONResponse(await _step_once(name, body, worlds, ctx))
    asked = body.request
    if (known := worlds.answered(ctx, name, asked)) is not None:
        return EventStream(_once(known), lambda: None)
    taken = await worlds.begin_step(ctx, name, asked)
    return EventStream(_step_chunks(taken, body, worlds), taken.close)


async def _step_once(name: str, body: StepBody, worlds: Sessions, ctx: RequestContext) -> Json:
    return await worlds.step(ctx, name, body.request, _answer(body, worlds))


@router.post("/{name}/observe", response_model=WorldTold)
async def observe(name: str, body: ObserveBody, worlds: Worlds, ctx: Admitted) -> Json:
    """What really happened. Imagined steps since the last real observation are dropped."""
    return await _observe(name, body, worlds, ctx)


async def _observe(name: str, body: ObserveBody, worlds: Sessions, ctx: RequestContext) -> Json:
    return _world(await worlds.observe(ctx, name, body.action, body.observation), worlds)


@router.post("/{name}/fork", status_code=201, response_model=WorldList)
async def fork(name: str, worlds: Worlds, ctx: Admitted, body: ForkBody | None = None) -> Json:
    """Copies that go their own ways."""
    return _list(await worlds.fork(ctx, name, 1 if body is None else body.count), worlds)


@router.post("/{name}/plan", response_model=PlanTold)
async def plan(name: str, body: PlanBody, worlds: Worlds, ctx: Admitted) -> Json:
    """Scores of candidate action sequences, and the observation that the best one ends with. The world stays."""
    decode = body.decode is None or body.decode
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    candidates, best, observation = await worlds.plan(ctx, name, body.candidates, decode, most)
    told = [
        {"score": found.score, "rewards": found.rewards, "continuations": found.continuations} for found in candidates
    ]
    return {"id": name, "object": "world.plan", "candidates": told, "best": best, "observation": observation}


batch_router = APIRouter(route_class=CancelledWithClient)


@batch_router.post("/v1/worlds:batch", response_model=BatchTold)
async def batch(body: BatchBody, worlds: Worlds, ctx: Admitted) -> Response:
    """Worlds are created, stepped, observed and deleted side by side. Each request has an answer of its own: a status,
    and the body that it would have had alone."""
    answers = await together([_one(item, worlds, ctx) for item in body.requests])
    return JSONResponse({"object": "world.batch", "data": answers})


async def _one(item: BatchItem, worlds: Sessions, ctx: RequestContext) -> Json:
    try:
        if isinstance(item, BatchCreate):
            return {"status": 201, "body": await _create(item, worlds, ctx)}
        if isinstance(item, BatchStep):
            return {"status": 200, "body": await _step_once(item.world, item, worlds, ctx)}
        if isinstance(item, BatchObserve):
            return {"status": 200, "body": await _observe(item.world, item, worlds, ctx)}
        return {"status": 200, "body": await delete(item.world, worlds, ctx.key)}
    except Exception as error:  # the other requests have been done and their answers must not be lost
        problem = problem_of(error)
        if not isinstance(error, EXPECTED):
            log.exception("a request of a batch failed")
        return {"status": problem.status, "body": problem.envelope()}


def _list(sessions: Sequence[Session], worlds: Sessions) -> Json:
    return {"object": "list", "data": [_world(session, worlds) for session in sessions]}


def _world(session: Session, worlds: Sessions) -> Json:
    log = session.log
    return {
        "id": session.id,
        "object": "world",
        "created": session.created,
        "model": worlds.service.card.name,
        "imagined_steps": len(log.actions),
        "steps_cut": log.steps_cut,
        "tokens": session.tokens,
        "state_slots": worlds.state_slots,
        "max_loops": log.depth.limit,
        "expires_in": worlds.store.limits.ttl,
    }


async def _once(known: Json) -> AsyncIterator[Json]:
    yield known


async def _step_chunks(taken: PendingStep, body: StepBody, worlds: Sessions) -> AsyncIterator[Json]:
    """First what is known of each step, then observations as they come, at last the whole reply."""
    base = {"id": taken.session.id, "object": "world.step.chunk"}
    for index, (action, told) in enumerate(zip(taken.asked.actions, taken.steps, strict=True)):
        yield {**base, "index": index, "delta": _transition(action, told)}
    async for index, delta in taken.deltas():
        if isinstance(delta, Finish):
            yield {**base, "index": index, "delta": {"finish_reason": delta}}
        elif delta.tokens:
            yield {**base, "index": index, "delta": _observed(delta.text, [delta], bool(body.logprobs))}
    yield await taken.finish(_answer(body, worlds))


def _answer(body: StepBody, worlds: Sessions) -> Callable[[Session, Sequence[Imagined]], Json]:
    def answer(session: Session, steps: Sequence[Imagined]) -> Json:
        told = [_step(action, imagined, body) for action, imagined in zip(body.request.actions, steps, strict=True)]
        world = _world(session, worlds)
        return {"id": session.id, "object": "world.step", "steps": told, "usage": _usage(steps), "world": world}

    return answer


def _step(action: str, imagined: Imagined, body: StepBody) -> Json:
    observed = _observed(imagined.observation, imagined.deltas, bool(body.logprobs))
    unsure = {"uncertainty": _uncertainty(imagined)} if body.uncertainty else {}
    return {**_transition(action, imagined.step), **observed, **unsure, "finish_reason": imagined.finish}


def _uncertainty(imagined: Imagined) -> Json | None:
    """Nats: the mean of an observation's tokens and its end, and the end's own; None where nothing was decoded."""
    if imagined.finish is None:
        return None
    scores = [token.scores.chosen for delta in imagined.deltas for token in delta.tokens if token.scores is not None]
    ends = [] if imagined.end_score is None else [imagined.end_score]
    return {"observation": -mean([*scores, *ends]), "end": -ends[0] if ends else None}


def _transition(action: str, told: Step) -> Json:
    return {
        "action": action,
        "reward": told.reward,
        "continuation": told.continuation,
        "loops": told.loops,
        "summary": told.summary,
    }


def _observed(text: str | None, deltas: Sequence[TextDelta], scored: bool) -> Json:
    tokens = {"tokens": [told for delta in deltas for told in _tokens(delta)]} if scored else {}
    return {"observation": text, **tokens}


def _tokens(delta: TextDelta) -> list[Json]:
    """A delta's tokens, whose texts joined are its text: a character of several tokens comes with its last one."""
    if not delta.tokens:
        return []
    starts = [token.start - delta.tokens[0].start for token in delta.tokens]
    texts = [delta.text[start:end] for start, end in pairwise([*starts, len(delta.text)])]
    return [
        {"token": text, "logprob": token.scores and token.scores.chosen, "loops": token.loops}
        for text, token in zip(texts, delta.tokens, strict=True)
    ]


def _usage(steps: Sequence[Imagined]) -> Json:
    """Tokens decoded, and loops: mean of the transitions, and of decoded tokens with the end marks."""
    advance = [imagined.step.loops for imagined in steps]
    decode = [loops for imagined in steps for loops in imagined.loops]
    tokens = sum(len(delta.tokens) for imagined in steps for delta in imagined.deltas)
    means = {"advance": mean(advance), "decode": mean(decode) if decode else None}
    return {"completion_tokens": tokens, "loops": means}
