"""The engine: one thread owns the model, requests wait in a bounded queue. Token ids only, no text, no HTTP."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from loopwm.core import CoreState, SharedState
from loopwm.machine import give_back
from loopwm.text.decoding import Hypothesis
from loopwm.text.model.modeling import LoopWMForCausalLM
from serve.engine.batch import RunningBatch
from serve.engine.beams import deliver, search
from serve.engine.forward import ForwardGenerator, ModelRunner, WorkItem, results
from serve.engine.outputs import OutputQueue
from serve.engine.prefill import prefill
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Event, Request, RequestContext
from serve.engine.requests import Sequence as Row
from serve.engine.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE = 2.0
"""Seconds without work after which memory is given back."""

BUSY = 10.0
"""Seconds of work after which it is given back, too: what prompts of all lengths leave between them adds up."""

LONGEST_RETRY = 60
"""Seconds that a client is told to wait at most."""


class QueueFullError(RuntimeError):
    """No room for another waiting request. retry_after: seconds until there may be."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(RuntimeError):
    """The engine takes no requests (any more)."""


class DeadlineError(TimeoutError):
    """The request took longer than its client would wait."""


@dataclass(frozen=True)
class Limits:
    """max_batch: rows that decode together. max_queue: requests that may wait beside them.

    prefill_tokens_with_decodes: of passes between two tokens of those who decode; twice as many where twice as many wait as decode,
    and so on. max_num_batched_tokens: where nobody decodes, and at most.
    cache_bytes: keys and values of all that runs and is kept. Who would not fit waits; what runs already may outgrow it
    by the tokens that it decodes.
    """

    max_batch: int = 64
    max_queue: int = 128
    prefill_tokens_with_decodes: int = 64
    max_num_batched_tokens: int = 512
    cache_bytes: int = 2 << 30


class Engine:
    """Use as a context manager: the thread runs inside it."""

    def __init__(
        self, model: LoopWMForCausalLM, end_token: int, limits: Limits | None = None, threads: int | None = None
    ) -> None:
        """threads: of the processor, for the engine's own thread; None for torch's default."""
        self.limits = limits or Limits()
        self.outputs = OutputQueue()
        self.forward = ModelRunner(model)
        self.forward.token_bytes(model.config.default_depth)
        self.cache = PrefixCache(self.limits.cache_bytes)
        self._threads = threads
        self._end_token = end_token
        self._batch = RunningBatch(self.forward, end_token)
        self._scheduler = Scheduler()
        self._admitted: set[RequestContext] = set()
        self._retry_estimator = RetryEstimator()
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
    def load(self) -> tuple[int, int]:
        """Rows decoding now, and what waits or runs beside them."""
        return len(self._batch), len(self._scheduler.tasks)

    def admit(self, key: str = "", seconds: float = math.inf) -> RequestContext:
        """A client's request comes in, and `leave` must follow. seconds: that it waits at most.

        Raises QueueFullError or EngineStoppedError; what belongs to a request that is in is not refused any more.
        """
        self._check_alive()
        most = self.limits.max_batch + self.limits.max_queue
        with self._changed:
            if len(self._admitted) >= most:
                waiting = len(self._admitted) - self.limits.max_batch
                told = f"{waiting} requests are waiting already, more are not taken"
                raise QueueFullError(told, self._retry_estimator.seconds(waiting))
            ctx = RequestContext(key, time.monotonic() + seconds)
            self._admitted.add(ctx)
        return ctx

    def release(self, ctx: RequestContext) -> None:
        """Whatever the request has left goes with it."""
        with self._changed:
            self._admitted.discard(ctx)
            self._retry_estimator.tick(busy=bool(self._admitted))

    def submit(self, request: Request, deliver: Callable[[Event], None], ctx: RequestContext | None = None) -> Row:
        """Queues a request. Raises EngineStoppedError."""
        (row,) = self.submit_all([request], [deliver], ctx)
        return row

    def submit_all(
        self,
        requests: Sequence[Request],
        delivers: Sequence[Callable[[Event], None]],
        ctx: RequestContext | None = None,
    ) -> list[Row]:
        """Queues requests that go on from one prompt, which runs once. Raises EngineStoppedError."""
        rows = [Row(*each, ctx) for each in zip(requests, delivers, strict=True)]
        first = requests[0]
        size = len(first.prompt) + sum(request.max_tokens for request in requests)
        steps: ForwardGenerator[Any] = self._start(first)
        join: Callable[[Any], None] = partial(self._join, rows)
        if first.beam_search:
            steps, join = self._search(first, len(rows)), partial(self._deliver_beams, rows)
        self._add(WorkItem(steps, join, rows[0].ctx, rows, size, first.depth.limit))
        return rows

    def work(
        self,
        steps: ForwardGenerator[T],
        deliver: Callable[[T | Exception], None],
        ctx: RequestContext | None = None,
        size: int = 0,
        loops: int = 1,
    ) -> WorkItem:
        """Queues a piece of work with the model; others come in between its passes. size: tokens it will keep, of so
        many loops each.

        `deliver` gets what it returns or raises, on the engine's thread. Raises EngineStoppedError.
        """
        return self._add(WorkItem(steps, deliver, ctx or RequestContext(), size=size, loops=loops))

    def _add(self, task: WorkItem) -> WorkItem:
        self._check_alive()
        with self._changed:
            self._scheduler.add(task)
            self._changed.notify()
        return task

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine is not running")

    def _start(self, request: Request) -> ForwardGenerator[CoreState]:
        """The state before the last token of a prompt."""
        if request.start is not None:
            return request.start.fork()
        return (yield from prefill(self.forward, self.cache, request.prompt[:-1], request.depth.limit))

    def _join(self, rows: Sequence[Row], state: CoreState | Exception) -> None:
        """Rows of one prompt begin to decode; several read what comes before their last token together."""
        if isinstance(state, Exception):
            return self._fail(rows, state)
        state = _shareable(state) if len(rows) > 1 else state
        for row in rows:
            try:
                self._batch.add(row, state.fork())
            except Exception as error:
                log.exception("a row could not join")
                row.deliver(Event(error=error))
        return None

    def _search(self, request: Request, beams: int) -> ForwardGenerator[list[Hypothesis]]:
        state = _shareable((yield from self._start(request)))
        return (yield from search(self.forward, state, request, beams, self._end_token))

    def _deliver_beams(self, rows: Sequence[Row], best: list[Hypothesis] | Exception) -> None:
        if isinstance(best, Exception):
            return self._fail(rows, best)
        for row, hypothesis in zip(rows, best, strict=True):
            deliver(row, hypothesis)
        return None

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._wait_for_work():
            try:
                self._expire()
                self._step()
                self._work()
            except Exception as error:  # no single request's fault, which all get to hear
                log.exception("the engine failed and goes on without what it had")
                self._end(error)
            self.outputs.send()
            self._give_back_after(BUSY)
        self._end(EngineStoppedError("the service is shutting down"))
        self.outputs.send()

    def _end(self, error: Exception) -> None:
        """Of all that runs and waits."""
        self._fail(self._batch.clear(), error)
        with self._changed:
            tasks = self._scheduler.take_out(lambda _: True)
        for task in tasks:
            task.deliver(error)

    def _wait_for_work(self) -> bool:
        """False at the end. Who waits for long gives memory back first."""
        with self._changed:
            idle = not self._changed.wait_for(self._has_work, timeout=IDLE)
        if idle:
            self._give_back_after(0)
        with self._changed:
            if not self._has_work():
                self._scheduler.settle()
            self._changed.wait_for(self._has_work)
            return self._running

    def _give_back_after(self, seconds: float) -> None:
        if time.monotonic() - self._given_back >= seconds:
            give_back()
            self._given_back = time.monotonic()

    def _has_work(self) -> bool:
        return bool(self._scheduler.tasks or len(self._batch)) or not self._running

    def _step(self) -> None:
        """A token for all who decode. Sent before the passes of others."""
        self._batch.step()
        with self._changed:
            self._scheduler.charge(row.ctx.key for row in self._batch.rows)
        self.outputs.send()

    def _work(self) -> None:
        """Passes of as many tokens as may come between two tokens of those who decode; one for each task."""
        budget = self._budget()
        served: set[WorkItem] = set()
        self._begin(served)
        while budget > 0:
            with self._changed:
                together = self._scheduler.next(budget, served)
            if not together:
                return
            for (task, asked), result in zip(together, results([asked for _, asked in together]), strict=True):
                budget -= asked.tokens
                with self._changed:
                    self._scheduler.charge([task.ctx.key], asked.tokens)
                served.add(task)
                self._go_on(task, result)

    def _budget(self) -> int:
        decoding, most = len(self._batch), self.limits.max_num_batched_tokens
        if not decoding:
            return most
        with self._changed:
            waiting = len(self._scheduler.tasks)
        beside = self.limits.prefill_tokens_with_decodes
        return max(beside, min(most, beside * waiting // decoding))

    def _begin(self, served: set[WorkItem]) -> None:
        """Those whose turn it is say which pass they need first. Who waits for a row holds those up who want one, too,
        lest it wait for ever."""
        with self._changed:
            line = self._scheduler.unbegun(self.limits.max_batch, served)
            expected = sum(len(task.rows) for task in self._scheduler.tasks if task.begun)
        full = False
        for task in line:
            taken = len(self._batch) + expected
            full = full or bool(task.rows and taken and taken + len(task.rows) > self.limits.max_batch)
            if task.rows and full:
                continue
            if not self._has_memory(task) and not task.cancelled:
                return
            if self._go_on(task, None):
                expected += len(task.rows)

    def _has_memory(self, task: WorkItem) -> bool:
        """Whether what the task will hold fits in beside all that runs and what has begun and is still to come. What
        runs alone has all there is."""
        with self._changed:
            begun = [other for other in self._scheduler.tasks if other.begun]
        needed = sum(one.size * self.forward.token_bytes(one.loops) for one in (task, *begun) if one.size)
        return self.cache.make_room(needed) or (not len(self._batch) and not begun)

    def _go_on(self, task: WorkItem, result: Any) -> bool:
        """Whether the task has more passes to come."""
        more = task.advance(result)
        if not more:
            with self._changed:
                self._scheduler.remove(task)
        return more

    def _expire(self) -> None:
        """Who is past the deadline hears it, and who was cancelled leaves."""
        now = time.monotonic()
        late = DeadlineError("the request took longer than its deadline")
        with self._changed:
            tasks = self._scheduler.take_out(lambda task: task.cancelled or task.ctx.deadline < now)
        for task in tasks:
            if not task.cancelled:
                task.deliver(late)
        for row in self._batch.rows:
            if row.ctx.deadline < now and not row.cancelled:
                row.cancelled = True
                row.deliver(Event(error=late))

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        for row in rows:
            row.deliver(Event(error=error))


def _shareable(state: CoreState) -> CoreState:
    """The state of one row as something that rows read together, where there is something to read."""
    return SharedState(state, 1) if type(state) is CoreState and state.length else state


class RetryEstimator:
    """How fast requests come to their end while others wait."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._between = 1.0

    def tick(self, busy: bool) -> None:
        """A request ended; busy: others are still in."""
        now = time.monotonic()
        if busy:
            self._between += 0.1 * (min(now - self._last, LONGEST_RETRY) - self._between)
        self._last = now

    def seconds(self, requests: int) -> int:
        """Until so many have ended, at least one."""
        return max(1, min(LONGEST_RETRY, math.ceil(requests * self._between)))
