"""Store of world sessions. Owned by the event loop; runs no model."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from loopwm.core.exit_rules import ExitRule, name_of, read_rule
from loopwm.records.template import Context, Transition
from loopwm.worlds.protocol import longer
from serve.generation.rate_limits import RateLimiter
from serve.limits import WorldLimits
from serve.worlds.sqlite import Change, StorageError, WorldFile

Json = dict[str, Any]


@dataclass(frozen=True)
class WorldLog:
    """Text and settings of a world. KV caches are derived from it and may be evicted.

    context: real observations, cut to the context limit.
    depth: exit rule of every forward.
    actions: imagined actions since the last real observation.
    steps_cut: oldest steps, dropped from the context.
    """

    context: Context
    depth: ExitRule
    actions: tuple[str, ...] = ()
    steps_cut: int = 0

    @property
    def size(self) -> int:
        """Bytes of text."""
        return len("".join((*self.context.texts, *self.actions)).encode())

    def with_actions(self, actions: Sequence[str]) -> WorldLog:
        return replace(self, actions=(*self.actions, *actions))

    def with_observation(self, action: str, observation: str) -> WorldLog:
        """Return the log after a real step, without imagined actions. It may exceed the context limit."""
        return replace(self, context=longer(self.context, action, observation), actions=())

    def json(self) -> Json:
        """Return the fields of a request that creates the world."""
        rule = {"rule": name_of(self.depth), **vars(self.depth)}
        depth = self.depth.limit if rule["rule"] == "fixed" else rule
        return {**asdict(self.context), "depth": depth, "actions": self.actions, "steps_cut": self.steps_cut}


def read_log(fields: Mapping[str, Any]) -> WorldLog:
    """Parse the result of `WorldLog.json`."""
    history = tuple(Transition(**step) for step in fields["history"])
    texts = {name: fields[name] for name in ("goal", "observation", "look", "inventory", "hidden_state")}
    context = Context(history=history, **texts)
    return WorldLog(context, read_rule(fields["depth"]), tuple(fields["actions"]), fields["steps_cut"])


MAX_REMOVED = 10_000
"""Removed worlds whose reason is kept for the error message."""


class WorldNotFoundError(LookupError):
    """The world does not exist or belongs to another key; the response must not differ."""


class WorldGoneError(LookupError):
    """The world has been removed; the message has the reason and the cure."""


class WorldBusyError(RuntimeError):
    """Another request is changing the world."""


class StepIdReusedError(RuntimeError):
    """The id is that of a step with another body."""


class TooManyWorldsError(RuntimeError):
    """The key's quota of worlds is exhausted."""


class TooMuchTextError(RuntimeError):
    """The key's quota of world text is exhausted."""


class Answer(NamedTuple):
    """Reply to a step, kept for a repeated request. request: everything that the reply depends on. reply: JSON."""

    step_id: str
    request: str
    reply: str


@dataclass
class Session:
    """World session of a key.

    tokens: of the log with its imagined steps.
    created: seconds since 1970.
    used: time of the last use, by the store's clock.
    answer: to the last step, if it had an id.
    busy: set when the request that is changing the world ends; None if there is none.
    step_id: of that request.
    """

    id: str
    owner: str
    log: WorldLog
    tokens: int
    created: int
    used: float
    answer: Answer | None = None
    busy: asyncio.Event | None = field(default=None, compare=False)
    step_id: str | None = field(default=None, compare=False)

    def whole(self) -> Change:
        fields = {"owner": self.owner, "log": self.log.json(), "created": self.created}
        return Change(self.id, {**fields, "tokens": self.tokens, "used": self.used}, self.answer)

    def changed(self, actions: Sequence[str] = ()) -> Change:
        return Change(self.id, {"actions": actions, "tokens": self.tokens, "used": self.used}, self.answer)


def _size(log: WorldLog, answer: Answer | None) -> int:
    """Return the bytes of stored text."""
    return log.size + sum(map(len, answer or ()))


def _load(file: WorldFile) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    for name, fields, answered in file.read():
        if "log" in fields:
            sessions[name] = Session(name, fields["owner"], read_log(fields["log"]), 0, fields["created"], 0.0)
        session = sessions[name]
        session.log = session.log.with_actions(fields.get("actions", ()))
        session.tokens, session.used = fields["tokens"], fields["used"]
        session.answer = None if answered is None else Answer(*answered)
    return sessions


class WorldStore:
    """Sessions by id. Unused ones expire; with a file, the others survive a restart."""

    def __init__(
        self,
        limits: WorldLimits,
        clock: Callable[[], float] | None = None,
        file: WorldFile | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        """Load the sessions of the file. clock: seconds since 1970, never set. rate_limiter: quotas of keys."""
        self.limits = limits
        self._rate_limiter = rate_limiter or RateLimiter()
        start = time.time() - time.monotonic()
        self._clock = clock or (lambda: start + time.monotonic())
        self._file = file
        self.failing = False
        saved = sorted(() if file is None else _load(file).values(), key=lambda session: session.used)
        self._sessions = OrderedDict((session.id, session) for session in saved)  # least recently used first
        self._counts = Counter(session.owner for session in saved)
        self._bytes: Counter[str] = Counter()
        for session in saved:
            self._bytes[session.owner] += _size(session.log, session.answer)
        # Owner and reason by id.
        self._removed: OrderedDict[str, tuple[str, str]] = OrderedDict()
        # Removed from memory, not from the file yet; used since they were written.
        self._expired: list[str] = []
        self._unwritten: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

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

    def check_growth(self, session: Session, log: WorldLog, answer: Answer | None = None) -> None:
        """Check the quota for replacing the session's log and answer. Raises TooMuchTextError."""
        self._check_text(session.owner, _size(log, answer) - _size(session.log, session.answer))

    # Writes do not leave the event loop, so that neither a cancellation nor another request can come between file and
    # memory: a row is appended in less time than a thread takes to start on it.

    def add(self, owner: str, log: WorldLog, tokens: int, count: int = 1) -> list[Session]:
        """Create sessions of one log. Raises TooManyWorldsError, TooMuchTextError or StorageError."""
        self.check_room(owner, count, count * log.size)
        created = [
            Session(f"world-{secrets.token_urlsafe(18)}", owner, log, tokens, int(time.time()), self._clock())
            for _ in range(count)
        ]
        self.write([session.whole() for session in created])
        self._counts[owner] += count
        self._bytes[owner] += count * log.size
        self._sessions.update({session.id: session for session in created})
        return created

    def get(self, name: str, owner: str) -> Session:
        """Return a session. Raises WorldNotFoundError or WorldGoneError."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or not secrets.compare_digest(session.owner.encode(), owner.encode()):
            removed_owner, reason = self._removed.get(name, ("", ""))
            if reason and removed_owner == owner:
                raise WorldGoneError(f"{name} {reason}; create it again from its goal and history")
            raise WorldNotFoundError(f"There is no world {name!r}")
        self._touch(session)
        return session

    def of(self, owner: str, after: str = "") -> list[Session]:
        """Return the sessions of an owner whose ids follow `after`, by id: use does not change their order."""
        self._expire()
        own = (session for session in self if session.owner == owner and session.id > after)
        return sorted(own, key=lambda session: session.id)

    @contextmanager
    def changing(self, name: str, owner: str, step_id: str | None = None) -> Iterator[Session]:
        """Lock a session for a change. Raises WorldBusyError, or like `get`."""
        session = self.get(name, owner)
        if session.busy is not None:
            raise WorldBusyError(f"{name} is being changed by another request; fork it to run several")
        session.busy, session.step_id = asyncio.Event(), step_id
        try:
            yield session
        finally:
            session.busy.set()
            session.busy = session.step_id = None
            if session.id in self._sessions:  # it may have been deleted in the meantime
                self._touch(session)

    def change(self, session: Session, log: WorldLog, tokens: int, answer: Answer | None = None) -> None:
        """Replace a session's log, in the file, too. Raises TooMuchTextError or StorageError; nothing changes then."""
        self.check_growth(session, log, answer)
        added = log.actions[len(session.log.actions) :]
        after = replace(session, log=log, tokens=tokens, answer=answer)
        change = after.changed(added) if log == session.log.with_actions(added) else after.whole()
        if session.id in self._sessions:  # it may have been deleted in the meantime
            self.write([change])
            self._bytes[session.owner] += _size(log, answer) - _size(session.log, session.answer)
        session.log, session.tokens, session.answer = log, tokens, answer

    def remove(self, name: str, owner: str) -> None:
        """Delete a session. Raises StorageError, or like `get`."""
        session = self.get(name, owner)
        self.write([], [session.id])
        self._drop(session, "was deleted")

    def write(self, changes: Sequence[Change] = (), removed: Sequence[str] = ()) -> None:
        """Write to the file, if there is one, and delete expired worlds there. Raises StorageError."""
        if self._file is None:
            return
        self.failing = True
        self._file.write(changes, [*self._expired, *removed])
        self.failing, self._expired = False, []
        self._unwritten -= {change.world for change in changes}

    def close(self) -> None:
        """Write when worlds were last used, then close the file."""
        if self._file is not None:
            with suppress(StorageError):  # they expire earlier
                self.write([session.changed() for session in self if session.id in self._unwritten])
            self._file.close()

    def _touch(self, session: Session) -> None:
        session.used = self._clock()
        self._unwritten.add(session.id)
        self._sessions.move_to_end(session.id)

    def _expire(self) -> None:
        now = self._clock()
        expired = itertools.takewhile(lambda session: now - session.used > self.limits.ttl, self._sessions.values())
        for session in list(expired):
            if session.busy is None:
                if self._file is not None:
                    self._expired.append(session.id)
                self._drop(session, f"was not used for {self.limits.ttl:g} seconds")

    def _drop(self, session: Session, reason: str) -> None:
        del self._sessions[session.id]
        self._unwritten.discard(session.id)
        self._counts[session.owner] -= 1
        self._bytes[session.owner] -= _size(session.log, session.answer)
        self._removed[session.id] = (session.owner, reason)
        while len(self._removed) > MAX_REMOVED:
            self._removed.popitem(last=False)
