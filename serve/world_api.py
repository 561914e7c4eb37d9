"""World sessions over HTTP: what a chat API cannot say.

POST   /v1/worlds                  goal, observation, history … -> a world
GET    /v1/worlds                  one's own worlds
GET    /v1/worlds/{id}
DELETE /v1/worlds/{id}
POST   /v1/worlds/{id}/step        actions, decode: last | each | none
POST   /v1/worlds/{id}/observe     what really happened
POST   /v1/worlds/{id}/fork        copies that go their own ways
POST   /v1/worlds/{id}/plan        scores of candidate action sequences
"""

from __future__ import annotations

from statistics import mean
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from loopwm.text.format import Context, Transition
from serve.body import Body
from serve.depth import DepthBody, rule_of
from serve.routes import CancelledWithClient
from serve.service import DEFAULT_MAX_TOKENS
from serve.sessions import MAX_ACTIONS, MAX_CANDIDATES, Decode, Imagined, Sessions
from serve.worlds import Session

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


class ObserveBody(Body):
    action: Action
    observation: str


class ForkBody(Body):
    count: int = Field(1, ge=1, le=MAX_CANDIDATES)


class PlanBody(Body):
    candidates: Annotated[list[Actions], Field(min_length=1, max_length=MAX_CANDIDATES)]
    decode: bool | None = None
    max_tokens: int | None = Field(None, ge=1)


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def _owner(request: Request) -> str:
    """Whose worlds these are: the name of the key, the same for all where the service asks for none."""
    owner: str = request.scope.get("key_name", "")
    return owner


Worlds = Annotated[Sessions, Depends(_sessions)]
Owner = Annotated[str, Depends(_owner)]


@router.post("", status_code=201)
async def create(body: WorldBody, worlds: Worlds, owner: Owner) -> Json:
    worlds.service.check_model(body.model)
    return _world(await worlds.create(owner, body.context(), worlds.service.rule(rule_of(body.depth))), worlds)


@router.get("")
async def list_worlds(worlds: Worlds, owner: Owner) -> Json:
    return {"object": "list", "data": [_world(session, worlds) for session in worlds.store.of(owner)]}


@router.get("/{name}")
async def show(name: str, worlds: Worlds, owner: Owner) -> Json:
    return _world(worlds.store.get(name, owner), worlds)


@router.delete("/{name}")
async def delete(name: str, worlds: Worlds, owner: Owner) -> Json:
    worlds.store.remove(name, owner)
    return {"id": name, "object": "world.deleted", "deleted": True}


@router.post("/{name}/step")
async def step(name: str, body: StepBody, worlds: Worlds, owner: Owner) -> Json:
    actions = [body.actions] if isinstance(body.actions, str) else body.actions
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    session, steps = await worlds.step(owner, name, actions, body.decode or "last", most, bool(body.monitor))
    told = [_step(action, imagined) for action, imagined in zip(actions, steps, strict=True)]
    return {"id": name, "object": "world.step", "steps": told, "usage": _usage(steps), "world": _world(session, worlds)}


@router.post("/{name}/observe")
async def observe(name: str, body: ObserveBody, worlds: Worlds, owner: Owner) -> Json:
    return _world(await worlds.observe(owner, name, body.action, body.observation), worlds)


@router.post("/{name}/fork", status_code=201)
async def fork(name: str, worlds: Worlds, owner: Owner, body: ForkBody | None = None) -> Json:
    count = 1 if body is None else body.count
    return {"object": "list", "data": [_world(session, worlds) for session in worlds.fork(owner, name, count)]}


@router.post("/{name}/plan")
async def plan(name: str, body: PlanBody, worlds: Worlds, owner: Owner) -> Json:
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


def _step(action: str, imagined: Imagined) -> Json:
    told = imagined.step
    return {
        "action": action,
        "observation": imagined.observation,
        "reward": told.reward,
        "continuation": told.continuation,
        "loops": told.loops,
        "summary": told.summary,
    }


def _usage(steps: list[Imagined]) -> Json:
    """Tokens decoded, and loops: mean of the transitions, and of decoded tokens with the end marks."""
    advance = [imagined.step.loops for imagined in steps]
    decode = [loops for imagined in steps for loops in imagined.loops]
    means = {"advance": mean(advance), "decode": mean(decode) if decode else None}
    return {"completion_tokens": sum(imagined.tokens for imagined in steps), "loops": means}
