"""World sessions over HTTP: what a chat API cannot say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from statistics import mean
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from loopwm.records.template import Context, Transition
from serve.engine.requests import Finish
from serve.http.bodies import Body, DepthBody, rule_of
from serve.http.events import EventStream
from serve.http.routes import CancelledWithClient
from serve.words.imagining import Step
from serve.words.service import DEFAULT_MAX_TOKENS, Piece
from serve.words.sessions import MAX_ACTIONS, MAX_CANDIDATES, Decode, Imagined, Sessions, Stepping, StepRequest
from serve.words.store import Session

Json = dict[str, Any]
Action = Annotated[str, Field(min_length=1, max_length=2000)]
Actions = Annotated[list[Action], Field(min_length=1, max_length=MAX_ACTIONS)]

router = APIRouter(prefix="/v1/worlds", route_class=CancelledWithClient)


class StepTaken(Body):
    action: Action
    observation: str


class WorldBody(Body):
    """observation: the first one, or the one now if there is no history. depth: loops of every pass, or a rule."""

    model: str
    goal: str
    observation: str
    history: list[StepTaken] | None = None
    look: str | None = None
    inventory: str | None = None
    hidden_state: str | None = None
    depth: DepthBody | None = None

    def context(self) -> Context:
        steps = tuple(Transition(step.action, step.observation) for step in self.history or ())
        return Context(self.goal, self.observation, steps, self.look, self.inventory, self.hidden_state)


class StepBody(Body):
    actions: Action | Actions
    decode: Decode | None = None
    max_tokens: int | None = Field(None, ge=1)
    monitor: bool | None = None
    logprobs: bool | None = Field(None, description="tell each token of an observation")
    stream: bool | None = None

    @property
    def request(self) -> StepRequest:
        actions = [self.actions] if isinstance(self.actions, str) else self.actions
        most = self.max_tokens or DEFAULT_MAX_TOKENS
        return StepRequest(actions, self.decode or "last", most, bool(self.monitor), bool(self.logprobs))


class ObserveBody(Body):
    action: Action
    observation: str


class ForkBody(Body):
    count: int = Field(1, ge=1, le=MAX_CANDIDATES)


class PlanBody(Body):
    candidates: Annotated[list[Actions], Field(min_length=1, max_length=MAX_CANDIDATES)]
    decode: bool | None = None
    max_tokens: int | None = Field(None, ge=1)


async def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


async def _owner(request: Request) -> str:
    """Whose worlds these are: the name of the key, the same for all where the service asks for none."""
    owner: str = request.scope.get("key_name", "")
    return owner


Worlds = Annotated[Sessions, Depends(_sessions)]
Owner = Annotated[str, Depends(_owner)]


@router.post("", status_code=201)
async def create(body: WorldBody, worlds: Worlds, owner: Owner) -> Json:
    """A world from a goal, what was seen and, where there are any, earlier steps."""
    worlds.service.check_model(body.model)
    return _world(await worlds.create(owner, body.context(), worlds.service.rule(rule_of(body.depth))), worlds)


@router.get("")
async def list_worlds(worlds: Worlds, owner: Owner) -> Json:
    """One's own worlds, the most recently used last."""
    return {"object": "list", "data": [_world(session, worlds) for session in worlds.store.of(owner)]}


@router.get("/{name}")
async def show(name: str, worlds: Worlds, owner: Owner) -> Json:
    """A world as it is now."""
    return _world(worlds.store.get(name, owner), worlds)


@router.delete("/{name}")
async def delete(name: str, worlds: Worlds, owner: Owner) -> Json:
    """The world is gone, and its memory is free."""
    worlds.store.remove(name, owner)
    return {"id": name, "object": "world.deleted", "deleted": True}


@router.post("/{name}/step")
async def step(name: str, body: StepBody, worlds: Worlds, owner: Owner) -> Response:
    """One action or several; the observations asked for by `decode` are written out, whole or as server-sent events."""
    asked = body.request
    if body.stream:
        taken = await worlds.begin_step(owner, name, asked)
        return EventStream(_step_chunks(taken, asked, worlds), taken.close)
    return JSONResponse(_stepped(*await worlds.step(owner, name, asked), asked, worlds))


@router.post("/{name}/observe")
async def observe(name: str, body: ObserveBody, worlds: Worlds, owner: Owner) -> Json:
    """What really happened. Imagined steps since the last real observation are dropped."""
    return _world(await worlds.observe(owner, name, body.action, body.observation), worlds)


@router.post("/{name}/fork", status_code=201)
async def fork(name: str, worlds: Worlds, owner: Owner, body: ForkBody | None = None) -> Json:
    """Copies that go their own ways."""
    count = 1 if body is None else body.count
    return {"object": "list", "data": [_world(session, worlds) for session in worlds.fork(owner, name, count)]}


@router.post("/{name}/plan")
async def plan(name: str, body: PlanBody, worlds: Worlds, owner: Owner) -> Json:
    """Scores of candidate action sequences, and the observation that the best one ends with. The world stays."""
    decode = body.decode is None or body.decode
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    candidates, best, observation = await worlds.plan(owner, name, body.candidates, decode, most)
    told = [
        {"score": found.score, "rewards": found.rewards, "continuations": found.continuations} for found in candidates
    ]
    return {"id": name, "object": "world.plan", "candidates": told, "best": best, "observation": observation}


def _world(session: Session, worlds: Sessions) -> Json:
    world = session.world
    return {
        "id": session.id,
        "object": "world",
        "created": session.created,
        "model": worlds.service.card.name,
        "imagined_steps": world.steps,
        "steps_cut": world.steps_cut[0],
        "tokens": int(world.state.next_position[0]),
        "state_slots": world.latent.shape[1],
        "max_loops": world.depth.limit,
        "expires_in": worlds.store.limits.ttl,
    }


async def _step_chunks(taken: Stepping, asked: StepRequest, worlds: Sessions) -> AsyncIterator[Json]:
    """First what is known of each step, then observations as they come, at last the whole reply."""
    base = {"id": taken.session.id, "object": "world.step.chunk"}
    for index, (action, told) in enumerate(zip(asked.actions, taken.steps, strict=True)):
        yield {**base, "index": index, "delta": _transition(action, told)}
    async for index, piece in taken.pieces():
        if isinstance(piece, Finish):
            yield {**base, "index": index, "delta": {"finish_reason": piece}}
        elif piece.tokens:
            yield {**base, "index": index, "delta": _observed(piece.text, [piece], asked.scored)}
    yield _stepped(taken.session, taken.finish(), asked, worlds)


def _stepped(session: Session, steps: Sequence[Imagined], asked: StepRequest, worlds: Sessions) -> Json:
    told = [_step(*row, asked.scored) for row in zip(asked.actions, steps, strict=True)]
    world = _world(session, worlds)
    return {"id": session.id, "object": "world.step", "steps": told, "usage": _usage(steps), "world": world}


def _step(action: str, imagined: Imagined, scored: bool) -> Json:
    observed = _observed(imagined.observation, imagined.pieces, scored)
    return {**_transition(action, imagined.step), **observed, "finish_reason": imagined.finish}


def _transition(action: str, told: Step) -> Json:
    return {
        "action": action,
        "reward": told.reward,
        "continuation": told.continuation,
        "loops": told.loops,
        "summary": told.summary,
    }


def _observed(text: str | None, pieces: Sequence[Piece], scored: bool) -> Json:
    tokens = {"tokens": [told for piece in pieces for told in _tokens(piece)]} if scored else {}
    return {"observation": text, **tokens}


def _tokens(piece: Piece) -> list[Json]:
    """A piece's tokens, whose texts joined are its text: a character of several tokens comes with its last one."""
    if not piece.tokens:
        return []
    starts = [token.start - piece.tokens[0].start for token in piece.tokens]
    texts = [piece.text[start:end] for start, end in pairwise([*starts, len(piece.text)])]
    return [
        {"token": text, "logprob": token.scores and token.scores.chosen, "loops": token.loops}
        for text, token in zip(texts, piece.tokens, strict=True)
    ]


def _usage(steps: Sequence[Imagined]) -> Json:
    """Tokens decoded, and loops: mean of the transitions, and of decoded tokens with the end marks."""
    advance = [imagined.step.loops for imagined in steps]
    decode = [loops for imagined in steps for loops in imagined.loops]
    tokens = sum(len(piece.tokens) for imagined in steps for piece in imagined.pieces)
    means = {"advance": mean(advance), "decode": mean(decode) if decode else None}
    return {"completion_tokens": tokens, "loops": means}
