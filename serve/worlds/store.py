"""Store of world sessions. Owned by the event loop; runs no model."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve.generation.rate_limits import RateLimiter
from serve.worlds.log import WorldLog, read_log
from serve.worlds.sqlite import SavedWorld, WorldFile

MAX_REMOVED = 10_000
"""Removed worlds whose reason is kept for the error message."""


class WorldNotFoundError(LookupError):
    """The world does not exist or belongs to another key; the response must not differ."""


class WorldGoneError(LookupError):
    """The world has been removed; the message has the reason and the cure."""


class WorldBusyError(RuntimeError):
    """Another request is changing the world."""


class TooManyWorldsError(RuntimeError):
    """The key's quota of worlds is exhausted."""


class TooMuchTextError(RuntimeError):
    """The key's quota of world text is exhausted."""


@dataclass(frozen=True)
class WorldLimits:
    """Limits of the store.

    ttl: seconds without use after which a world expires.
    max_worlds: worlds per key without a quota of its own.
    """

    ttl: float = 3600.0
    max_worlds: int = 4096


@dataclass
class Session:
    """World session of a key.

    tokens: of the log with its imagined steps.
    created: seconds since 1970.
    used: time of the last use, by the store's clock.
    last_reply: the client's id of the last step and its reply as JSON, for repeated requests.
    busy: a request is changing the world.
    """

    id: str
    owner: str
    log: WorldLog
    tokens: int
    created: int
    used: float
    last_reply: tuple[str, str] | None = None
    busy: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes of stored text."""
        return self.log.size + (0 if self.last_reply is None else len(self.last_reply[1]))

    def to_row(self) -> SavedWorld:
        fields = {"owner": self.owner, "log": self.log.json(), "tokens": self.tokens, "created": self.created}
        # "answered" is the name in the file format.
        return SavedWorld(self.id, self.used, {**fields, "answered": self.last_reply})


def _session(row: SavedWorld) -> Session:
    world = row.world
    reply = None if world["answered"] is None else (world["answered"][0], world["answered"][1])
    log = read_log(world["log"])
    return Session(row.id, world["owner"], log, world["tokens"], world["created"], row.used, reply)


class WorldStore:
    """Sessions by id. Unused ones expire; with a file, the others survive a restart."""

    def __init__(
        self,
        limits: WorldLimits,
        clock: Callable[[], float] = time.time,
        file: WorldFile | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        """Load the sessions of the file.

        clock: seconds since 1970.
        rate_limiter: quotas of keys.
        """
        self.limits = limits
        self._rate_limiter = rate_limiter or RateLimiter()
        self._clock = clock
        self._file = file
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="worlds-file")
        saved = [] if file is None else [_session(row) for row in file.read()]
        self._sessions = OrderedDict((session.id, session) for session in saved)  # least recently used first
        self._counts = Counter(session.owner for session in saved)
        self._bytes: Counter[str] = Counter()
        for session in saved:
            self._bytes[session.owner] += session.size
        # Owner and reason by id.
        self._removed: OrderedDict[str, tuple[str, str]] = OrderedDict()
        # Removed from memory, not from the file yet.
        self._unwritten: list[str] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def check_room(self, owner: str, count: int = 1, size: int = 0) -> None:
        """Check the quotas for `count` new worlds of `size` bytes in total.

        Raises:
            TooManyWorldsError, TooMuchTextError
        """
        self._expire()
        worlds = self._rate_limiter.quota(owner).worlds
        limit, current = self.limits.max_worlds if worlds is None else worlds, self._counts[owner]
        if current + count > limit:
            raise TooManyWorldsError(f"world quota exceeded: {current} + {count} > {limit}; delete a world")
        self._check_text(owner, size)

    def _check_text(self, owner: str, size: int) -> None:
        limit, current = self._rate_limiter.quota(owner).bytes, self._bytes[owner]
        if limit is not None and size > 0 and current + size > limit:
            raise TooMuchTextError(f"world text quota exceeded: {current} + {size} > {limit} bytes; delete a world")

    def check_growth(self, session: Session, log: WorldLog) -> None:
        """Check the quota for replacing the session's log. Raises TooMuchTextError."""
        self._check_text(session.owner, log.size - session.log.size)

    async def add(self, owner: str, log: WorldLog, tokens: int, count: int = 1) -> list[Session]:
        """Create sessions of one log. Raises TooManyWorldsError or TooMuchTextError."""
        self.check_room(owner, count, count * log.size)
        now = self._clock()
        created = [
            Session(f"world-{secrets.token_urlsafe(18)}", owner, log, tokens, int(time.time()), now)
            for _ in range(count)
        ]
        self._counts[owner] += count
        self._bytes[owner] += count * log.size
        self._sessions.update({session.id: session for session in created})
        try:
            await self.save(created)
        except BaseException:  # including cancellation: the client has not received their ids
            for session in created:
                self._drop(session, "could not be written to the file")
            raise
        return created

    def get(self, name: str, owner: str) -> Session:
        """Return a session. Raises WorldNotFoundError or WorldGoneError."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or not secrets.compare_digest(session.owner.encode(), owner.encode()):
            raise self._absence(name, owner)
        self._touch(session)
        return session

    def of(self, owner: str) -> list[Session]:
        """Return all sessions of an owner, the most recently used last."""
        self._expire()
        return [session for session in self._sessions.values() if session.owner == owner]

    @contextmanager
    def changing(self, name: str, owner: str) -> Iterator[Session]:
        """Lock a session for a change. Raises WorldBusyError, or like `get`."""
        session = self.get(name, owner)
        if session.busy:
            raise WorldBusyError(f"{name} is being changed by another request; fork it to run several")
        session.busy = True
        try:
            yield session
        finally:
            session.busy = False
            if session.id in self._sessions:  # it may have been deleted in the meantime
                self._touch(session)

    async def change(
        self, session: Session, log: WorldLog, tokens: int, last_reply: tuple[str, str] | None = None
    ) -> None:
        """Replace a session's log, in the file, too; undone if that fails. Raises TooMuchTextError."""
        before = session.log, session.tokens, session.last_reply
        self.check_growth(session, log)
        self._set(session, log, tokens, last_reply)
        try:
            await self.save([session])
        except BaseException:
            self._set(session, *before)
            raise

    def _set(self, session: Session, log: WorldLog, tokens: int, last_reply: tuple[str, str] | None) -> None:
        before = session.size
        session.log, session.tokens, session.last_reply = log, tokens, last_reply
        if session.id in self._sessions:  # it may have been deleted in the meantime
            self._bytes[session.owner] += session.size - before

    async def remove(self, name: str, owner: str) -> None:
        """Delete a session. Raises like `get`."""
        self._drop(self.get(name, owner), "was deleted")
        await self.save([])

    async def save(self, sessions: Sequence[Session]) -> None:
        """Write sessions, and delete removed ones, in the file."""
        if self._file is None:
            return
        removed, self._unwritten = self._unwritten, []
        rows = [session.to_row() for session in sessions if session.id in self._sessions]
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._file.write, rows, removed)
        except BaseException:
            self._unwritten += removed  # deleting twice does no harm
            raise

    def close(self) -> None:
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    def _touch(self, session: Session) -> None:
        session.used = self._clock()
        self._sessions.move_to_end(session.id)

    def _absence(self, name: str, owner: str) -> LookupError:
        removed_owner, reason = self._removed.get(name, ("", ""))
        if reason and removed_owner == owner:
            return WorldGoneError(f"{name} {reason}; create it again from its goal and history")
        return WorldNotFoundError(f"There is no world {name!r}")

    def _expire(self) -> None:
        now = self._clock()
        expired = itertools.takewhile(lambda session: now - session.used > self.limits.ttl, self._sessions.values())
        for session in list(expired):
            if not session.busy:
                self._drop(session, f"was not used for {self.limits.ttl:g} seconds")

    def _drop(self, session: Session, reason: str) -> None:
        del self._sessions[session.id]
        self._counts[session.owner] -= 1
        self._bytes[session.owner] -= session.size
        self._unwritten.append(session.id)
        self._removed[session.id] = (session.owner, reason)
        while len(self._removed) > MAX_REMOVED:
            self._removed.popitem(last=False)
