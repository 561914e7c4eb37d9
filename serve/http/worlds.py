"""Endpoints of world sessions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, Field, StringConstraints

from loopwm.records.refusals import is_accepted
from loopwm.records.template import Context, Transition
from serve.generation.service import DEFAULT_MAX_TOKENS, RequestContext
from serve.generation.streams import Finish, TextDelta, together
from serve.http import schemas
from serve.http.bodies import MAX_STEPS, DepthBody, OwnBody, depth_of
from serve.http.errors import EXPECTED, problem_of
from serve.http.replies import FOREIGN, event_stream
from serve.http.routes import Admitted, Owner
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

MAX_PAGE = 1000
"""Most worlds of a page of the list."""

Json = dict[str, Any]
VISIBLE = r"[^\s\x00-\x1f\x7f-\xa0\u200b-\u200f\u2028-\u202f\u2060-\u2064\ufeff]"
"""A character other than spaces, control and zero-width characters."""

Text = Annotated[str, StringConstraints(strip_whitespace=True)]
Action = Annotated[str, Field(min_length=1, max_length=2000, pattern=VISIBLE)]
Actions = Annotated[list[Action], Field(min_length=1, max_length=MAX_ACTIONS, fail_fast=True)]

router = APIRouter()


class HistoryStep(OwnBody):
    action: Action
    observation: Text


class WorldBody(OwnBody):
    """World to create.

    observation: the first one.
    depth: loops of every forward, or an exit rule.
    actions, steps_cut: imagined actions and dropped steps of an exported world.
    """

    model: str
    goal: Text
    observation: Text
    history: Annotated[list[HistoryStep], Field(max_length=MAX_STEPS, fail_fast=True)] | None = None
    look: Text | None = None
    inventory: Text | None = None
    hidden_state: Text | None = None
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
    logprobs: bool | None = Field(None, description="return each token of an observation")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**62), lt=2**62)
    step_id: str | None = Field(None, min_length=1, max_length=200, description="a repeated step is executed once")
    stream: bool | None = None

    @property
    def request(self) -> StepRequest:
        return StepRequest(
            [self.actions] if isinstance(self.actions, str) else self.actions,
            self.decode or "last",
            self.max_tokens or DEFAULT_MAX_TOKENS,
            monitor=bool(self.monitor),
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            step_id=self.step_id,
            logprobs=bool(self.logprobs),
        )


class ObserveBody(OwnBody):
    action: Action
    observation: Text
    check: bool = False


class ForkBody(OwnBody):
    count: int = Field(1, ge=1, le=MAX_CANDIDATES)


class PlanBody(OwnBody):
    candidates: Annotated[list[Actions], Field(min_length=1, max_length=MAX_CANDIDATES, fail_fast=True)]
    decode: bool | None = None
    max_tokens: int | None = Field(None, ge=1)


def _distinct(actions: list[str]) -> list[str]:
    for i, action in enumerate(actions):
        if action in actions[:i]:
            raise ValueError(f"candidate {i} repeats candidate {actions.index(action)}: {action!r}")
    return actions


class ActionsBody(OwnBody):
    candidates: Annotated[
        list[Action], Field(min_length=1, max_length=MAX_CANDIDATES, fail_fast=True), AfterValidator(_distinct)
    ]
    decode: bool | None = None
    max_tokens: int | None = Field(None, ge=1)


class BatchCreate(WorldBody):
    op: Literal["create"]


def _not_streamed(stream: bool) -> bool:
    """Reject `stream: true`. A Literal[False] would accept 0, too."""
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
    """Requests for different worlds, executed concurrently."""

    requests: Annotated[list[BatchItem], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


async def _sessions(request: Request) -> Sessions:
    return request.app.state.sessions


Worlds = Annotated[Sessions, Depends(_sessions)]


@router.post("/v1/worlds", status_code=201, response_model=schemas.WorldInfo)
async def create(body: WorldBody, worlds: Worlds, ctx: Admitted) -> Json:
    """Create a world from a goal, an observation and, optionally, later steps."""
    worlds.service.check_model(body.model)
    context = await asyncio.to_thread(body.context)
    session = await worlds.create(ctx, context, depth_of(body.depth), body.actions or (), body.steps_cut or 0)
    return _world(session, worlds)


@router.get("/v1/worlds", response_model=schemas.WorldPage)
async def list_worlds(
    worlds: Worlds, owner: Owner, after: str = "", limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE
) -> Json:
    """List the key's worlds by id, those after the id `after`."""
    sessions = worlds.store.of(owner, after)
    page = await asyncio.to_thread(_list, sessions[:limit], worlds)  # it may tokenize every text
    return {**page, "has_more": len(sessions) > limit}


@router.get("/v1/worlds/{name}", response_model=schemas.WorldInfo)
async def show(name: str, worlds: Worlds, owner: Owner) -> Json:
    """Show a world."""
    return _world(worlds.store.get(name, owner), worlds)


@router.get("/v1/worlds/{name}/export", responses={200: {"model": WorldBody}})
async def export(name: str, worlds: Worlds, owner: Owner) -> Response:
    """Export a world as the body of a request that creates it again, on any service."""
    return JSONResponse({"model": worlds.service.card.name, **worlds.store.get(name, owner).log.json()})


@router.delete("/v1/worlds/{name}", response_model=schemas.Deleted)
async def delete(name: str, worlds: Worlds, owner: Owner) -> Json:
    """Delete a world and free its memory."""
    worlds.remove(owner, name)
    return {"id": name, "object": "world.deleted", "deleted": True}


@router.post(
    "/v1/worlds/{name}/step", response_model=schemas.StepResult, responses=schemas.stream_responses("the whole step")
)
async def step(name: str, body: StepBody, worlds: Worlds, ctx: Admitted) -> Response:
    """Imagine one action or several; return the observations selected by `decode`, whole or as server-sent events."""
    if not body.stream:
        return JSONResponse(await _step_once(name, body, worlds, ctx))
    if (saved := await worlds.saved_reply(ctx, name, body.request)) is not None:
        return event_stream(_once(saved))
    pending = await worlds.begin_step(ctx, name, body.request)
    return event_stream(_step_chunks(pending, body, worlds))


async def _step_once(name: str, body: StepBody, worlds: Sessions, ctx: RequestContext) -> Json:
    return await worlds.step(ctx, name, body.request, partial(_stepped, body, worlds))


@router.post("/v1/worlds/{name}/observe", response_model=schemas.Observed)
async def observe(name: str, body: ObserveBody, worlds: Worlds, ctx: Admitted) -> Json:
    """Add a real step, and check what was imagined for it. Imagined steps since the last real one are dropped."""
    check = StepRequest([body.action], "each", DEFAULT_MAX_TOKENS) if body.check else None
    session, imagined = await worlds.observe(ctx, name, body.action, body.observation, check)
    return {**_world(session, worlds), "check": imagined and _check(imagined, body.observation)}


def _check(imagined: Imagined, observation: str) -> Json:
    said = imagined.observation or ""
    return {
        "observation": said,
        "exact": said.split() == observation.split(),
        "missing": _lines_beyond(observation, said),
        "wrong": _lines_beyond(said, observation),
        "trust": imagined.trust,
    }


def _lines_beyond(text: str, other: str) -> list[str]:
    """Return the lines of a text that the other one lacks, or has less often. White space does not count."""
    left, beyond = Counter(" ".join(line.split()) for line in other.splitlines()), []
    for line in text.splitlines():
        left[words := " ".join(line.split())] -= 1
        if words and left[words] < 0:
            beyond.append(line)
    return beyond


@router.post("/v1/worlds/{name}/fork", status_code=201, response_model=schemas.WorldList)
async def fork(name: str, worlds: Worlds, ctx: Admitted, body: ForkBody | None = None) -> Json:
    """Copy a world; the copies change independently."""
    return _list(await worlds.fork(ctx, name, 1 if body is None else body.count), worlds)


@router.post("/v1/worlds/{name}/plan", response_model=schemas.PlanResult)
async def plan(name: str, body: PlanBody, worlds: Worlds, ctx: Admitted) -> Json:
    """Score candidate action sequences and decode the observation after the best one. The world does not change."""
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    candidates, best, observation = await worlds.plan(ctx, name, body.candidates, body.decode is not False, most)
    scores = [{"score": one.score, "rewards": one.rewards, "continuations": one.continuations} for one in candidates]
    return {"id": name, "object": "world.plan", "candidates": scores, "best": best, "observation": observation}


@router.post("/v1/worlds/{name}/actions", response_model=schemas.ActionsResult)
async def actions(name: str, body: ActionsBody, worlds: Worlds, ctx: Admitted) -> Json:
    """Imagine each candidate alone: whether it is accepted, and what it brings. The world does not change."""
    decode: Decode = "none" if body.decode is False else "each"
    imagined = await worlds.actions(ctx, name, body.candidates, decode, body.max_tokens or DEFAULT_MAX_TOKENS)
    data = [_outcome(action, step) for action, step in zip(body.candidates, imagined, strict=True)]
    return {"id": name, "object": "world.actions", "data": data}


def _outcome(action: str, imagined: Imagined) -> Json:
    names = ("acceptance", "reward", "expected_reward", "continuation")
    return {
        "action": action,
        "accepted": is_accepted(imagined.observation or "", imagined.step.acceptance),
        "observation": imagined.observation,
        "trust": imagined.trust,
        **{name: getattr(imagined.step, name) for name in names},
    }


@router.post("/v1/worlds:batch", response_model=schemas.BatchResult)
async def batch(body: BatchBody, worlds: Worlds, ctx: Admitted) -> Response:
    """Create, step, observe and delete worlds concurrently. Returns a status and a body for each request."""
    responses = await together([_one(item, worlds, ctx) for item in body.requests])
    return JSONResponse({"object": "world.batch", "data": responses})


async def _one(item: BatchItem, worlds: Sessions, ctx: RequestContext) -> Json:
    try:
        if isinstance(item, BatchCreate):
            return {"status": 201, "body": await create(item, worlds, ctx)}
        if isinstance(item, BatchStep):
            return {"status": 200, "body": await _step_once(item.world, item, worlds, ctx)}
        if isinstance(item, BatchObserve):
            return {"status": 200, "body": await observe(item.world, item, worlds, ctx)}
        return {"status": 200, "body": await delete(item.world, worlds, ctx.key)}
    except Exception as error:  # the other requests have taken effect: their responses must not be lost
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
        "warnings": [FOREIGN] if worlds.is_foreign(log.context) else [],
    }


async def _once(data: Json) -> AsyncIterator[Json]:
    yield data


async def _step_chunks(pending: PendingStep, body: StepBody, worlds: Sessions) -> AsyncIterator[Json]:
    """Yield the transition of each step, then observations as they are decoded, then the whole reply."""
    base = {"id": pending.session.id, "object": "world.step.chunk"}
    for index, (action, transition) in enumerate(zip(pending.request.actions, pending.steps, strict=True)):
        yield {**base, "index": index, "delta": _transition(action, transition)}
    async for index, delta in pending.deltas():
        if isinstance(delta, Finish):
            yield {**base, "index": index, "delta": {"finish_reason": delta}}
        elif delta.tokens:
            yield {**base, "index": index, "delta": _observed(delta.text, [delta], bool(body.logprobs))}
    yield pending.finish(partial(_stepped, body, worlds))


def _stepped(body: StepBody, worlds: Sessions, session: Session, steps: Sequence[Imagined]) -> Json:
    rendered = [_step(action, step, body) for action, step in zip(body.request.actions, steps, strict=True)]
    world = _world(session, worlds)
    return {"id": session.id, "object": "world.step", "steps": rendered, "usage": _usage(steps), "world": world}


def _step(action: str, imagined: Imagined, body: StepBody) -> Json:
    observed = _observed(imagined.observation, imagined.deltas, bool(body.logprobs))
    ending = {"finish_reason": imagined.finish, "trust": imagined.trust}
    return {**_transition(action, imagined.step), **observed, **ending}


def _transition(action: str, step: Step) -> Json:
    names = ("reward", "expected_reward", "continuation", "acceptance", "loops", "summary")
    return {"action": action, **{name: getattr(step, name) for name in names}}


def _observed(text: str | None, deltas: Sequence[TextDelta], scored: bool) -> Json:
    tokens = {"tokens": [token for delta in deltas for token in _tokens(delta)]} if scored else {}
    return {"observation": text, **tokens}


def _tokens(delta: TextDelta) -> list[Json]:
    """Return a delta's tokens; their texts join to its text. A character of several tokens comes with its last one."""
    if not delta.tokens:
        return []
    starts = [token.start - delta.tokens[0].start for token in delta.tokens]
    texts = [delta.text[start:end] for start, end in pairwise([*starts, len(delta.text)])]
    return [
        {"token": text, "logprob": token.scores and token.scores.chosen, "loops": token.loops}
        for text, token in zip(texts, delta.tokens, strict=True)
    ]


def _usage(steps: Sequence[Imagined]) -> Json:
    """Return decoded tokens, and mean loops of transitions and of decoded tokens with their ends."""
    decode = [loops for imagined in steps for loops in imagined.loops]
    tokens = sum(len(delta.tokens) for imagined in steps for delta in imagined.deltas)
    means = {"advance": mean(imagined.step.loops for imagined in steps), "decode": mean(decode) if decode else None}
    return {"completion_tokens": tokens, "loops": means}
