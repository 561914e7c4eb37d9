"""Games of pixel worlds that clients of the service play. Owned by the event loop; one thread steps them all."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED
from loopwm.records.template import FormatError
from serve.generation.service import DeadlineError, EngineStoppedError, ModelNotFoundError, RequestContext, Service
from serve.worlds.sessions import UnsupportedError
from serve.worlds.store import TooManyWorldsError, WorldNotFoundError

if TYPE_CHECKING:  # they need the extra `pixel`, the service does not
    from serve.pixels.game import Game
    from serve.pixels.play import Keyboard

FOLDER = PACKAGED.parent / "pixel/pretrained"
MODELS = tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.json")))
"""Packaged worlds."""
MAX_GAMES = 32
"""Games of all keys: a game's history takes up to 25 MB, and one core steps about 200 frames/s."""
MAX_PER_KEY = 16
TTL = 600.0
"""Seconds without use after which a game expires."""

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(eq=False)
class Session:
    """Game of a key. turn: of the request that plays; a later one takes over."""

    owner: str
    model: str
    game: Game
    keyboard: Keyboard
    used: float
    id: str = field(default_factory=lambda: f"game-{secrets.token_urlsafe(18)}")
    turn: object = None


class Games:
    """Games by id. Unused ones expire, and their number is bounded."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._sessions: dict[str, Session] = {}
        # A thread of the game's own would open another OpenMP pool, which slows the engine down.
        self._thread = ThreadPoolExecutor(1, "pixels", torch.set_num_threads, (1,))

    async def create(self, owner: str, model: str, seed: int) -> Session:
        """Begin a game, in place of the key's longest unused one if it has no room for another.

        Raises ModelNotFoundError, UnsupportedError or TooManyWorldsError.
        """
        if model not in MODELS:
            raise ModelNotFoundError(model, tuple(MODELS))
        self._superseded(owner)
        game, keyboard = await self._run(partial(_open, model, seed))
        for unused in self._superseded(owner):  # other games may have begun meanwhile
            del self._sessions[unused.id]
        session = Session(owner, model, game, keyboard, self._clock())
        self._sessions[session.id] = session
        return session

    def get(self, name: str, owner: str) -> Session:
        """Return a game. Raises WorldNotFoundError."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise WorldNotFoundError(f"There is no game {name!r}; it may have expired")
        session.used = self._clock()
        return session

    def play(self, ctx: RequestContext, session: Session, keys: str, fps: float) -> AsyncIterator[Json]:
        """Return the game after each key, or now if there is none, until a later request plays it.

        fps: most frames a second. Raises FormatError for an unknown key, before any is played.
        """
        try:
            commands = [*session.keyboard.script(keys)]
        except InputError as error:
            if session.turn is None:
                del self._sessions[session.id]  # nobody has been told its id
            raise FormatError("keys", str(error).removeprefix("--keys: ")) from error
        session.turn = ctx
        return self._frames(ctx, session, commands or [lambda game: None], 1 / fps)

    async def _frames(
        self, ctx: RequestContext, session: Session, commands: Sequence[Callable[[Game], None]], pause: float
    ) -> AsyncIterator[Json]:
        due = time.monotonic()
        for command in commands:
            # A late frame shortens the pauses after it: the agent imagines before every fourth one only.
            await asyncio.sleep(due - time.monotonic())
            if session.turn is not ctx:
                return
            if not self._service.engine.alive:
                raise EngineStoppedError("the service is shutting down")
            if time.monotonic() > ctx.deadline:
                raise DeadlineError("the request took longer than its deadline")
            session.used, due = self._clock(), due + pause
            frame = await self._run(partial(_step, session.game, command))
            keys = {"actions": session.keyboard.actions, "arrows": session.keyboard.arrows}
            yield {"id": session.id, "object": "game.frame", "model": session.model, **keys, **frame}

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _superseded(self, owner: str) -> list[Session]:
        """Return the games that end when a key begins another. Raises TooManyWorldsError."""
        self._expire()
        limit = min(MAX_PER_KEY, self._service.rate_limiter.quota(owner).worlds or MAX_PER_KEY)
        own = sorted((one for one in self._sessions.values() if one.owner == owner), key=lambda session: session.used)
        ending = own[: max(0, len(own) + 1 - limit)]
        if (games := len(self._sessions)) - len(ending) >= MAX_GAMES:
            raise TooManyWorldsError(f"{games} of all {MAX_GAMES} games are open; idle ones expire in {TTL:g} s")
        return ending

    def _expire(self) -> None:
        oldest = self._clock() - TTL
        self._sessions = {name: session for name, session in self._sessions.items() if session.used >= oldest}


def _step(game: Game, command: Callable[[Game], None]) -> Json:
    command(game)
    return game.json()


def _open(model: str, seed: int) -> tuple[Game, Keyboard]:
    """Open a packaged world and its simulator. Raises UnsupportedError without their packages."""
    try:
        from serve.pixels.play import open_game
    except ModuleNotFoundError as error:
        raise UnsupportedError("model", f"needs the package {error.name}: pip install 'loopwm[pixel]'") from error
    game, keyboard, missing = open_game(FOLDER / model, seed)
    if missing:
        raise UnsupportedError("model", missing)
    return game, keyboard
