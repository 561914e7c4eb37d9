"""World sessions: worlds that clients keep between requests. Owned by the event loop; runs no model."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loopwm.core import CoreState, SharedState
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


class Holdings:
    """Bytes of states by name, of which several may share a prefix: that counts once. Kept up to date, not counted
    anew, for every step of every world asks."""

    def __init__(self) -> None:
        self.total = 0
        self._own: dict[str, tuple[int, CoreState | None]] = {}
        self._sharers: Counter[int] = Counter()

    def put(self, name: str, state: CoreState) -> None:
        """In place of the state it had."""
        prefix = state.prefix if isinstance(state, SharedState) else None
        shared = 0 if prefix is None else prefix.nbytes()
        own = state.nbytes() - shared
        if prefix is not None:
            self._sharers[id(prefix)] += 1
            self.total += shared if self._sharers[id(prefix)] == 1 else 0
        self.total += own
        self.drop(name)
        self._own[name] = own, prefix

    def drop(self, name: str) -> None:
        """Does nothing for a name that has no state."""
        own, prefix = self._own.pop(name, (0, None))
        self.total -= own
        if prefix is not None:
            self._sharers[id(prefix)] -= 1
            if not self._sharers[id(prefix)]:
                del self._sharers[id(prefix)]
                self.total -= prefix.nbytes()


class WorldStore:
    """Worlds by unguessable ids. The least recently used goes first when memory is short; a busy one stays."""

    def __init__(self, limits: WorldLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the least recently used first
        self._holdings = Holdings()
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, owner: str, world: World, real: World) -> Session:
        self._expire()
        session = Session(f"world-{secrets.token_urlsafe(18)}", owner, world, real, int(time.time()), self._clock())
        self._sessions[session.id] = session
        self._account(session)
        return session

    def get(self, name: str, owner: str) -> Session:
        """Raises WorldNotFoundError or WorldGoneError."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or not secrets.compare_digest(session.owner.encode(), owner.encode()):
            raise self._absence(name, owner)
        self._touch(session)
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
            if session.id in self._sessions:  # it may have been deleted meanwhile
                self._touch(session)
                self._account(session)

    def remove(self, name: str, owner: str) -> None:
        """Raises as `get` does."""
        self._drop(self.get(name, owner), "was deleted")

    def nbytes(self) -> int:
        """Of all worlds; what several share counts once."""
        return self._holdings.total

    def _touch(self, session: Session) -> None:
        session.used = self._clock()
        self._sessions.move_to_end(session.id)

    def _account(self, session: Session) -> None:
        """Notes what the session holds now; others leave if that is too much."""
        self._holdings.put(session.id, session.world.state)
        if self.nbytes() > self.limits.most_bytes:
            self._evict(keep=session)

    def _absence(self, name: str, owner: str) -> LookupError:
        whose, why = self._gone.get(name, ("", ""))
        if why and whose == owner:
            return WorldGoneError(f"{name} {why}; create it again from its goal and history")
        return WorldNotFoundError(f"There is no world {name!r}")

    def _expire(self) -> None:
        now = self._clock()
        late = itertools.takewhile(lambda session: now - session.used > self.limits.ttl, self._sessions.values())
        for session in list(late):
            if not session.busy:
                self._drop(session, f"was not used for {self.limits.ttl:g} seconds")

    def _evict(self, keep: Session) -> None:
        for session in list(self._sessions.values()):
            if self.nbytes() <= self.limits.most_bytes:
                return
            if not session.busy and session is not keep:
                self._drop(session, "was the least recently used when memory ran short")

    def _drop(self, session: Session, why: str) -> None:
        del self._sessions[session.id]
        self._holdings.drop(session.id)
        self._gone[session.id] = (session.owner, why)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
