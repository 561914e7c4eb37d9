"""World sessions: worlds that clients keep between requests. Owned by the event loop; runs no model."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loopwm.core import SharedState
from loopwm.text.world import World

REMEMBERED = 10_000
"""Worlds that are gone and of which clients are still told why."""


class WorldNotFoundError(LookupError):
    """No such world, or somebody else's: the two must look alike."""


class WorldGoneError(LookupError):
    """The world was there; the message says why it is gone and what to do."""


class WorldBusyError(RuntimeError):
    """Another request is changing the world."""


@dataclass(frozen=True)
class WorldLimits:
    """ttl: seconds a world lives after its last use. most_bytes: keys and values of all worlds together."""

    ttl: float = 3600.0
    most_bytes: int = 2 << 30


@dataclass
class Session:
    """A world and whose it is.

    world: as it was imagined last. real: as it was after the last real observation. created: seconds since 1970. used:
    when it was last asked for, by the store's clock. busy: a request is changing it.
    """

    id: str
    owner: str
    world: World
    real: World
    created: int
    used: float
    busy: bool = False


class WorldStore:
    """Worlds by unguessable ids. The least recently used goes first when memory is short; a busy one stays."""

    def __init__(self, limits: WorldLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, owner: str, world: World, real: World) -> Session:
        self._expire()
        session = Session(f"world-{secrets.token_urlsafe(18)}", owner, world, real, int(time.time()), self._clock())
        self._sessions[session.id] = session
        self._evict(keep=session)
        return session

    def get(self, name: str, owner: str) -> Session:
        """Raises WorldNotFoundError or WorldGoneError."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or not secrets.compare_digest(session.owner, owner):
            raise self._absence(name, owner)
        session.used = self._clock()
        self._sessions.move_to_end(name)
        return session

    def of(self, owner: str) -> list[Session]:
        """All worlds of an owner, the most recently used last."""
        self._expire()
        return [session for session in self._sessions.values() if session.owner == owner]

    @contextmanager
    def changing(self, name: str, owner: str) -> Iterator[Session]:
        """The session, for one who means to replace its world. Raises as `get` does, and WorldBusyError."""
        session = self.get(name, owner)
        if session.busy:
            raise WorldBusyError(f"{name} is being changed by another request; fork it to try several things at once")
        session.busy = True
        try:
            yield session
        finally:
            session.busy = False
            session.used = self._clock()
            self._evict(keep=session)

    def remove(self, name: str, owner: str) -> None:
        """Raises as `get` does."""
        self._drop(self.get(name, owner), "was deleted")

    def nbytes(self) -> int:
        """Of all worlds; what several share counts once."""
        states = [session.world.state for session in self._sessions.values()]
        shared = {id(s.prefix): s.prefix.nbytes() for s in states if isinstance(s, SharedState)}
        own = sum(s.nbytes() - (s.prefix.nbytes() if isinstance(s, SharedState) else 0) for s in states)
        return own + sum(shared.values())

    def _absence(self, name: str, owner: str) -> LookupError:
        whose, why = self._gone.get(name, ("", ""))
        if why and whose == owner:
            return WorldGoneError(f"{name} {why}; create it again from its goal and history")
        return WorldNotFoundError(f"There is no world {name!r}")

    def _expire(self) -> None:
        now = self._clock()
        for session in list(self._sessions.values()):
            if not session.busy and now - session.used > self.limits.ttl:
                self._drop(session, f"was not used for {self.limits.ttl:g} seconds")

    def _evict(self, keep: Session) -> None:
        for session in list(self._sessions.values()):
            if self.nbytes() <= self.limits.most_bytes:
                return
            if not session.busy and session is not keep:
                self._drop(session, "was the least recently used when memory ran short")

    def _drop(self, session: Session, why: str) -> None:
        del self._sessions[session.id]
        self._gone[session.id] = (session.owner, why)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
