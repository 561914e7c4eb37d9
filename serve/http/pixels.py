"""Endpoint of games in packaged pixel worlds: a simulator and a world model of it, played by the same keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from serve.http.bodies import OwnBody
from serve.http.replies import event_stream
from serve.http.routes import Admitted
from serve.http.schemas import stream_responses
from serve.pixels.games import Games

router = APIRouter()


class GameBody(OwnBody):
    """Keys to play in a game of a packaged world: actions from 0 on, A agent, B back, F fork, N next episode.

    id: of a game; null begins one, with this seed
    """

    model: str
    id: str | None = None
    seed: int = Field(0, ge=0, lt=2**31)
    keys: str = Field("", max_length=1000)
    fps: float = Field(60.0, ge=1, le=60, description="most frames a second")


async def _games(request: Request) -> Games:
    return request.app.state.games


@router.post("/v1/games", response_class=Response, responses=stream_responses("the last frame"))
async def play(body: GameBody, games: Annotated[Games, Depends(_games)], ctx: Admitted) -> Response:
    """Play a game: a frame after each key, without keys the current one. A later request takes over from this one."""
    session = await games.create(ctx.key, body.model, body.seed) if body.id is None else games.get(body.id, ctx.key)
    return event_stream(games.play(ctx, session, body.keys, body.fps))
