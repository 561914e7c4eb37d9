"""World sessions: worlds that clients keep between requests. Owned by the event loop; runs no model."""

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
from serve.worlds.sqlite import Saved, WorldFile

REMEMBERED = 10_000
"""Worlds that are gone and of which clients are still told why."""


class WorldNotFoundError(LookupError):
    """No such world, or somebody else's: the two must look alike."""


class WorldGoneError(LookupError):
    """The world was there; the message says why it is gone and what to do."""


class WorldBusyError(RuntimeError):
    """Another request is changing the world."""


class TooManyWorldsError(RuntimeError):
    """A key has as many worlds as it may."""


class TooMuchTextError(RuntimeError):
    """The worlds of a key have as much text as they may."""


@dataclass(frozen=True)
class WorldLimits:
    """ttl: seconds a world lives after its last use. most_worlds: of one key that has no limit of its own."""

    ttl: float = 3600.0
    most_worlds: int = 4096


@dataclass
class Session:
    """A world and whose it is.

    tokens: of the log with its imagined steps. created: seconds since 1970. used: when it was last asked for, by the
    store's clock. busy: a request is changing it. answered: the name that a client gave its last step, and what it was
    answered, as JSON.
    """

    id: str
    owner: str
    log: WorldLog
    tokens: int
    created: int
    used: float
    answered: tuple[str, str] | None = None
    busy: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes of text that are kept for it."""
        return self.log.size + (0 if self.answered is None else len(self.answered[1]))

    def saved(self) -> Saved:
        told = {"owner": self.owner, "log": self.log.json(), "tokens": self.tokens, "created": self.created}
        return Saved(self.id, self.used, {**told, "answered": self.answered})


def _session(saved: Saved) -> Session:
    told = saved.world
    answered = None if told["answered"] is None else (told["answered"][0], told["answered"][1])
    return Session(
        saved.id, told["owner"], read_log(told["log"]), told["tokens"], told["created"], saved.used, answered
    )


class WorldStore:
    """Sessions by id. Those that nobody has used for long go; with a file, the others survive the service."""

    def __init__(
        self,
        limits: WorldLimits,
        clock: Callable[[], float] = time.time,
        file: WorldFile | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        """clock: seconds since 1970. rate_limiter: of keys."""
        self.limits = limits
        self._rate_limiter = rate_limiter or RateLimiter()
        self._clock = clock
        self._file = file
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="worlds-file")
        found = [] if file is None else [_session(saved) for saved in file.read()]
        self._sessions = OrderedDict((session.id, session) for session in found)  # the least recently used first
        self._counts = Counter(session.owner for session in found)
        self._bytes: Counter[str] = Counter()
        for session in found:
            self._bytes[session.owner] += session.size
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._unwritten: list[str] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def check_room(self, owner: str, count: int = 1, size: int = 0) -> None:
        """For so many worlds of so many bytes together. Raises TooManyWorldsError or TooMuchTextError."""
        self._expire()
        worlds = self._rate_limiter.of(owner).worlds
        most = self.limits.most_worlds if worlds is None else worlds
        if self._counts[owner] + count > most:
            raise TooManyWorldsError(f"{self._counts[owner]} worlds are kept of at most {most}: delete some")
        self._check_text(owner, size)

    def _check_text(self, owner: str, size: int) -> None:
        most = self._rate_limiter.of(owner).bytes
        if most is not None and size > 0 and self._bytes[owner] + size > most:
            had = self._bytes[owner]
            raise TooMuchTextError(
                f"{had} bytes of text are kept of at most {most}, {size} more are too many: delete some"
            )

    def check_growth(self, session: Session, log: WorldLog) -> None:
        """For this log in the place of the session's. Raises TooMuchTextError."""
        self._check_text(session.owner, log.size - session.log.size)

    async def add(self, owner: str, log: WorldLog, tokens: int, count: int = 1) -> list[Session]:
        """New sessions of one log. Raises TooManyWorldsError or TooMuchTextError."""
        self.check_room(owner, count, count * log.size)
        now = self._clock()
        made = [
            Session(f"world-{secrets.token_urlsafe(18)}", owner, log, tokens, int(time.time()), now)
            for _ in range(count)
        ]
        self._counts[owner] += count
        self._bytes[owner] += count * log.size
        self._sessions.update({session.id: session for session in made})
        try:
            await self.save(made)
        except BaseException:  # a client that left, too, has not heard of them
            for session in made:
                self._drop(session, "could not be written to the file of worlds")
            raise
        return made

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

    async def change(
        self, session: Session, log: WorldLog, tokens: int, answered: tuple[str, str] | None = None
    ) -> None:
        """The session moves on, in the file, too: where that cannot be written it stays as it was. Raises
        TooMuchTextError."""
        before = session.log, session.tokens, session.answered
        self.check_growth(session, log)
        self._set(session, log, tokens, answered)
        try:
            await self.save([session])
        except BaseException:
            self._set(session, *before)
            raise

    def _set(self, session: Session, log: WorldLog, tokens: int, answered: tuple[str, str] | None) -> None:
        before = session.size
        session.log, session.tokens, session.answered = log, tokens, answered
        if session.id in self._sessions:  # it may have been deleted meanwhile
            self._bytes[session.owner] += session.size - before

    async def remove(self, name: str, owner: str) -> None:
        """Raises as `get` does."""
        self._drop(self.get(name, owner), "was deleted")
        await self.save([])

    async def save(self, sessions: Sequence[Session]) -> None:
        """Writes these as they are now, and what has left since."""
        if self._file is None:
            return
        gone, self._unwritten = self._unwritten, []
        saved = [session.saved() for session in sessions if session.id in self._sessions]
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._file.write, saved, gone)
        except BaseException:
            self._unwritten += gone  # to leave a second time does no harm
            raise

    def close(self) -> None:
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    def _touch(self, session: Session) -> None:
        session.used = self._clock()
        self._sessions.move_to_end(session.id)

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

    def _drop(self, session: Session, why: str) -> None:
        del self._sessions[session.id]
        self._counts[session.owner] -= 1
        self._bytes[session.owner] -= session.size
        self._unwritten.append(session.id)
        self._gone[session.id] = (session.owner, why)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
