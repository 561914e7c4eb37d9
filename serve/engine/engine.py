"""The engine: one thread owns the model, requests wait in a bounded queue. Token ids only, no text, no HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from loopwm.machine import give_back
from loopwm.text.modeling import LoopWMForCausalLM
from serve.engine.batch import Batch, Passes, prefill_group
from serve.engine.jobs import Job, SharedPass, Steps
from serve.engine.outbox import Outbox
from serve.engine.requests import Event, Request, Ticket

log = logging.getLogger(__name__)
T = TypeVar("T")

PASSES_OF_JOBS = 4
"""Passes of queued work between two tokens of those who decode."""

IDLE = 2.0
"""Seconds without work after which memory is given back."""

BUSY = 10.0
"""Seconds of work after which it is given back, too: what prompts of all lengths leave between them adds up."""


class QueueFullError(RuntimeError):
    """No room for another waiting request."""


class EngineStoppedError(RuntimeError):
    """The engine takes no requests (any more)."""


@dataclass(frozen=True)
class Limits:
    """max_batch: rows that decode together. max_queue: requests that may wait beside them."""

    max_batch: int = 16
    max_queue: int = 64


class Engine:
    """Use as a context manager: the thread runs inside it."""

    def __init__(
        self, model: LoopWMForCausalLM, end_token: int, limits: Limits | None = None, threads: int | None = None
    ) -> None:
        """threads: of the processor, for the engine's own thread; None for torch's default."""
        self.limits = limits or Limits()
        self._threads = threads
        self.outbox = Outbox()
        self._batch = Batch(model, end_token, delivered=self.outbox.send)
        self._waiting: list[Ticket] = []
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._given_back = time.monotonic()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self._running = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Ends after the current token; whoever is still waiting hears an EngineStoppedError. Returns at once."""
        with self._changed:
            self._running = False
            self._changed.notify()

    @property
    def alive(self) -> bool:
        return self._running and self._thread.is_alive()

    @property
    def passes(self) -> Passes:
        """The model, for work that is queued by `work`."""
        return self._batch.passes

    @property
    def load(self) -> tuple[int, int]:
        """Rows decoding now and requests waiting."""
        return len(self._batch), len(self._waiting) + len(self._jobs)

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Ticket:
        """Queues a request. Raises QueueFullError or EngineStoppedError."""
        ticket = Ticket(request, deliver)
        with self._changed:
            self._check_room()
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Frees the request's place: at once if it waits, at the next token if it runs. Harmless when it is over."""
        ticket.cancelled = True
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def work(self, steps: Steps[T], deliver: Callable[[T | Exception], None]) -> Job:
        """Queues a piece of work with the model; others come in between its passes.

        `deliver` gets what it returns or raises, on the engine's thread. Raises QueueFullError or EngineStoppedError.
        """
        job = Job(steps, deliver)
        with self._changed:
            self._check_room()
            self._jobs.append(job)
            self._changed.notify()
        return job

    def _check_room(self) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine is not running")
        _, waiting = self.load
        if waiting >= self.limits.max_queue:
            raise QueueFullError(f"{waiting} requests are waiting already, more are not taken")

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._wait_for_work():
            self._admit(self._take(self.limits.max_batch - len(self._batch)))
            self._step()
            self._work()
            self._give_back_after(BUSY)
        stopped = EngineStoppedError("the service is shutting down")
        self._fail([*self._batch.clear(), *self._waiting], stopped)
        for job in self._jobs:
            job.deliver(stopped)
        self._waiting.clear()
        self._jobs.clear()

    def _wait_for_work(self) -> bool:
        """False at the end. Who waits for long gives memory back first."""
        with self._changed:
            idle = not self._changed.wait_for(self._has_work, timeout=IDLE)
        if idle:
            self._give_back_after(0)
        with self._changed:
            self._changed.wait_for(self._has_work)
            return self._running

    def _give_back_after(self, seconds: float) -> None:
        if time.monotonic() - self._given_back >= seconds:
            give_back()
            self._given_back = time.monotonic()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._jobs or len(self._batch)) or not self._running

    def _work(self) -> None:
        """A few passes for those who wait now; who had one goes to the end of the line."""
        line = list(self._jobs)
        for _ in range(PASSES_OF_JOBS):
            line = [job for job in line if (job.begun and not job.cancelled) or self._go_on(job, None)]
            if not line:
                return
            together = self._together(line)
            line = [job for job in line if job not in together]
            self._pass(together)

    def _together(self, line: Sequence[Job]) -> list[Job]:
        """The first, and those whose pass can be taken with its own."""
        first = line[0].asked
        if first is None:
            return [line[0]]
        return [job for job in line if job.asked is not None and job.asked.key == first.key][: self.limits.max_batch]

    def _pass(self, together: Sequence[Job]) -> None:
        for job, result in zip(together, _results([job.asked for job in together]), strict=True):
            self._go_on(job, result)

    def _go_on(self, job: Job, result: Any) -> bool:
        """Whether the job has more passes to come."""
        more = job.advance(result)
        with self._changed:
            self._jobs.remove(job)
            if more:
                self._jobs.append(job)
        return more

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
            self._batch.step()
        except Exception as error:
            log.exception("decoding a batch of %d failed", len(self._batch))
            self._fail(self._batch.clear(), error)

    def _take(self, room: int) -> list[Ticket]:
        """The first who wait, as many as there is room for and as run well together."""
        with self._changed:
            chosen = prefill_group(ticket.request for ticket in self._waiting[:room])
            taken = [self._waiting[i] for i in chosen]
            self._waiting = [ticket for ticket in self._waiting if ticket not in taken]
            return taken

    def _fail(self, tickets: list[Ticket], error: Exception) -> None:
        for ticket in tickets:
            ticket.deliver(Event(error=error))
        self.outbox.send()


def _results(passes: Sequence[SharedPass | None]) -> list[Any]:
    """What each of these passes, taken together, came to, or what it raised: where together they fail, each by itself,
    so that nobody gets another's error."""
    first, *others = passes
    try:
        return [None] if first is None else list(first.run(others))
    except Exception as error:
        return [error] if not others else [result for one in passes for result in _results([one])]
