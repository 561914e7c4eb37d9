"""The engine: one thread owns the model, requests wait in a bounded queue. Token ids only, no text, no HTTP."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loopwm.text.modeling import LoopWMForCausalLM
from serve.batch import Batch, Event, Request, Ticket, TokenScores, prefill_group

log = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """No room for another waiting request."""


class EngineStoppedError(RuntimeError):
    """The engine takes no requests (any more)."""


@dataclass(frozen=True)
class Limits:
    """max_batch: rows that decode together. max_queue: requests that may wait beside them."""

    max_batch: int = 16
    max_queue: int = 64


Deliver = Callable[[TokenScores | Exception], None]
"""Called once on the engine's thread with the scores or with what went wrong; must not block."""


class Engine:
    """Use as a context manager: the thread runs inside it."""

    def __init__(
        self, model: LoopWMForCausalLM, end_token: int, limits: Limits | None = None, depth: int | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._batch = Batch(model, end_token, depth)
        self._waiting: deque[Ticket] = deque()
        self._to_score: deque[tuple[tuple[int, ...], Deliver]] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self._running = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops after the current token; whoever is still waiting hears an EngineStoppedError."""
        with self._changed:
            self._running = False
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._running and self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Rows decoding now and requests waiting."""
        return len(self._batch), len(self._waiting) + len(self._to_score)

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Ticket:
        """Queues a request. Raises QueueFullError or EngineStoppedError."""
        ticket = Ticket(request, deliver)
        with self._changed:
            self._check_room(1)
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def score(self, prompts: Sequence[tuple[int, ...]], deliver: Sequence[Deliver]) -> None:
        """Queues prompts whose tokens are to be scored, all or none. Raises as `submit` does.

        Between any two tokens of the running batch one prompt is scored.
        """
        with self._changed:
            self._check_room(len(prompts))
            self._to_score.extend(zip(prompts, deliver, strict=True))
            self._changed.notify()

    def _check_room(self, new: int) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine is not running")
        _, waiting = self.load
        if waiting + new > self.limits.max_queue:
            raise QueueFullError(f"{waiting} requests are waiting already, more are not taken")

    def cancel(self, ticket: Ticket) -> None:
        """Frees the request's place: at once if it waits, at the next token if it runs. Harmless when it is over."""
        ticket.cancelled = True
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _run(self) -> None:
        while self._wait_for_work():
            self._admit(self._take(self.limits.max_batch - len(self._batch)))
            self._step()
            self._score_next()
        self._fail([*self._batch.clear(), *self._waiting], EngineStoppedError("the service is shutting down"))
        self._waiting.clear()
        while self._to_score:
            self._to_score.popleft()[1](EngineStoppedError("the service is shutting down"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: any(self.load) or not self._running)
            return self._running

    # One bad batch must not end the service: whatever the model raises goes to the requests concerned.

    def _admit(self, tickets: list[Ticket]) -> None:
        try:
            if tickets:
                self._batch.admit(tickets)
        except Exception as error:
            log.exception("running %d prompts failed", len(tickets))
            self._fail(tickets, error)

    def _step(self) -> None:
        try:
            if len(self._batch):
                self._batch.step()
        except Exception as error:
            log.exception("decoding a batch of %d failed", len(self._batch))
            self._fail(self._batch.clear(), error)

    def _score_next(self) -> None:
        with self._changed:
            prompt, deliver = self._to_score.popleft() if self._to_score else ((), None)
        if deliver is None:
            return
        try:
            deliver(self._batch.score(prompt))
        except Exception as error:
            log.exception("scoring a prompt of %d tokens failed", len(prompt))
            deliver(error)

    def _take(self, room: int) -> list[Ticket]:
        """The first who wait, as many as there is room for and as run well together."""
        with self._changed:
            first = itertools.islice(self._waiting, room)
            return [self._waiting.popleft() for _ in range(prefill_group(ticket.request.prompt for ticket in first))]

    @staticmethod
    def _fail(tickets: list[Ticket], error: Exception) -> None:
        for ticket in tickets:
            ticket.deliver(Event(error=error))
