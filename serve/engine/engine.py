"""Engine: one thread that owns the model, and a bounded queue. Token ids only, no text, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.core.kv_cache import KVCache
from loopwm.runtime import release_memory
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.world_batch import PASS_TOKENS
from serve.engine.batch import RunningBatch
from serve.engine.forward import ForwardGenerator, ModelRunner, TokenScores, extend, prefill, run_batch, score
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Request, RequestContext, WorkItem
from serve.engine.scheduler import RetryEstimator, Scheduler
from serve.limits import Limits

log = logging.getLogger(__name__)

IDLE_SECONDS = 2.0
"""Time without work after which memory is returned to the system."""

STALL_SECONDS = 30.0
"""Time of one iteration after which the engine makes no progress: a step takes less than a second."""

WHOLE_PROMPT = 2048
"""Prefill tokens of a step for a key beside one that has most of the rows, and has used more: in pieces, its prompt
would wait for as many decode steps of them."""

BUSY_SECONDS = 10.0
"""Time of work after which it is returned, too, because prompts of many lengths fragment the heap."""


class QueueFullError(RuntimeError):
    """The request queue is full. retry_after: estimated seconds until there is room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(RuntimeError):
    """The engine is not running."""


class DeadlineError(TimeoutError):
    """The request's deadline has passed."""


class Engine:
    """Engine thread and its queue. Use as a context manager: the thread runs inside it."""

    def __init__(
        self, model: LoopWMForCausalLM, end_token: int, limits: Limits | None = None, threads: int | None = None
    ) -> None:
        """Measure the model's bytes per token; the thread starts on entering the context.

        threads: torch threads of the engine's thread; None for torch's default.
        """
        self.limits = limits or Limits()
        self.runner = ModelRunner(model)
        self.max_length = model.config.max_position_embeddings
        # Measured now, on this thread: admission on the engine's thread should not run an extra forward.
        self.runner.token_bytes(model.config.default_depth)
        self.cache = PrefixCache(self.limits.cache_bytes)
        self._threads = threads
        self.end_token = end_token
        self._batch = RunningBatch(self.runner, end_token)
        self._scheduler = Scheduler()
        self._admitted: set[RequestContext] = set()
        self._retry_estimator = RetryEstimator()
        self._outputs: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        # Guards the scheduler and the admitted requests; notified when there is work, and on shutdown.
        self._changed = threading.Condition()
        self._released_memory = time.monotonic()
        # Time at which the current iteration began; None while the engine waits for work.
        self._iteration: float | None = None
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
        """Stop after the current token, without blocking; remaining requests fail with EngineStoppedError."""
        with self._changed:
            self._running = False
            self._changed.notify()

    @property
    def alive(self) -> bool:
        return self._running and self._thread.is_alive()

    @property
    def progressing(self) -> bool:
        """Return True if the engine is idle, or has begun an iteration lately."""
        return self.alive and (self._iteration is None or time.monotonic() - self._iteration < STALL_SECONDS)

    async def check_source(self) -> None:
        """Raise an error if what generates the tokens, here this process, is known to be unable to."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of requests that decode, and of other work items, waiting or in prefill."""
        return len(self._batch), len(self._scheduler.items)

    @property
    def admitted(self) -> Counter[str]:
        """Number of admitted requests of each key."""
        with self._changed:
            return Counter(ctx.key for ctx in self._admitted)

    def admit(self, key: str = "", seconds: float = math.inf) -> RequestContext:
        """Admit a client's request, which must be released. Work of an admitted request is never refused.

        key: rate-limit key.
        seconds: time until its deadline.

        Raises:
            QueueFullError, EngineStoppedError
        """
        self._check_alive()
        with self._changed:
            places, admitted = self.limits.max_batch + self.limits.max_queue, self.admitted
            # A key alone may fill the queue: those that come later have their shares beside it.
            if admitted.total() >= places and admitted[key] >= _share(places, key, admitted):
                waiting = admitted.total() - self.limits.max_batch
                message = f"request queue is full ({waiting} waiting); retry later"
                raise QueueFullError(message, self._retry_estimator.seconds(waiting))
            ctx = RequestContext(key, time.monotonic() + seconds)
            self._admitted.add(ctx)
        return ctx

    def release(self, ctx: RequestContext) -> None:
        """End a client's call: release its slot and cancel what it still has in the engine."""
        ctx.cancelled = True
        ctx.exit_stack.close()
        with self._changed:
            self._admitted.discard(ctx)
            self._retry_estimator.record_end(busy=bool(self._admitted))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests that share one prompt, which is prefilled once. Raises EngineStoppedError."""
        first, *siblings = requests
        first.siblings, first.loops = siblings, first.depth.limit
        first.num_tokens = len(first.prompt) + sum(request.params.max_tokens or 0 for request in requests)
        first.steps = self._prefill(first)
        self.add(first)

    def add(self, item: WorkItem) -> None:
        """Queue a work item, whose forwards interleave with others'. Raises EngineStoppedError."""
        self._check_alive()
        with self._changed:
            self._scheduler.add(item)
            self._changed.notify()

    def check_depth(self, rule: ExitRule) -> ExitRule:
        """Return the rule. Raises ValueError, or NotImplementedError for one that this engine does not run."""
        return self.runner.model.model.core.check(rule)

    def score(self, prompt: tuple[int, ...], loops: int, top: int, start: Any = None) -> ForwardGenerator[TokenScores]:
        """Score the tokens of a prompt after a start. top: number of alternatives at each position."""
        return score(self.runner, prompt, Fixed(loops), top, start)

    def call_on(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Call on an event loop after this step. Engine thread only.

        Batches outputs per step: waking the event loop costs more than delivering.
        """
        self._outputs.setdefault(loop, []).append(call)

    def _flush_outputs(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for loop, calls in outputs.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no client is left
                loop.call_soon_threadsafe(_call_all, calls)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine is not running")

    def _prefill(self, request: Request) -> ForwardGenerator[KVCache]:
        """Return the KV cache before the last token, of the prompt or of a preempted text."""
        ids, loops = (*request.prompt, *request.output)[:-1], request.depth.limit
        if isinstance(request.start, KVCache):
            return (yield from extend(self.runner, request.start.fork(), ids, loops))
        return (yield from prefill(self.runner, self.cache, ids, loops))

    def _finish(self, item: WorkItem, result: Any) -> None:
        """Deliver the result (or exception) of an item's forwards; requests start to decode."""
        item.close()
        if not isinstance(item, Request):
            return item.deliver(result)
        requests, item.siblings = [item, *item.siblings], ()
        if isinstance(result, Exception):
            return _fail(requests, result)
        # Requests of one prompt share the KV cache of all but its last token.
        state = result
        if len(requests) > 1 and state.prefix is None and state.length:
            state = state.share(1)
        for request in requests:
            try:
                self._batch.add(request, state.fork())
            except Exception as error:
                log.exception("a request could not join the batch")
                request.fail(error)
        return None

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._wait_for_work():
            self._iteration = time.monotonic()
            try:
                self._expire()
                self._decode_step()
                self._prefill_step()
            except Exception as error:  # not the fault of a single request: fail all, keep serving
                log.exception("engine step failed; all its requests fail")
                self._fail_all(error)
            self._flush_outputs()
            self._release_memory_after(BUSY_SECONDS)
            self._iteration = None
        # After the loop, on this thread: the batch is not locked.
        self._fail_all(EngineStoppedError("the service is shutting down"))
        self._flush_outputs()

    def _fail_all(self, error: Exception) -> None:
        _fail(self._batch.clear(), error)
        with self._changed:
            items = self._scheduler.pop(lambda _: True)
        for item in items:
            self._finish(item, error)

    def _wait_for_work(self) -> bool:
        """Wait for work; return False on shutdown. Frees memory after IDLE_SECONDS."""
        with self._changed:
            idle = not self._changed.wait_for(self._has_work, timeout=IDLE_SECONDS)
        if idle:
            self._release_memory_after(0)  # outside of the lock: it takes milliseconds, and admission would wait
        with self._changed:
            if not self._has_work():
                self._scheduler.reset()
            self._changed.wait_for(self._has_work)
            return self._running

    def _release_memory_after(self, seconds: float) -> None:
        if time.monotonic() - self._released_memory >= seconds:
            release_memory()
            self._released_memory = time.monotonic()

    def _has_work(self) -> bool:
        return bool(self._scheduler.items or len(self._batch)) or not self._running

    def _decode_step(self) -> None:
        self._batch.step()
        with self._changed:
            self._scheduler.begin_step([request.ctx.key for request in self._batch.requests])
        # Before the prefill step, which would delay the tokens.
        self._flush_outputs()

    def _prefill_step(self) -> None:
        """Run forwards of work items within the token budget, at most one for each item."""
        num_batched_tokens = 0
        served: set[WorkItem] = set()
        self._start_waiting()
        while num_batched_tokens < (max_num_batched_tokens := self._max_num_batched_tokens(served)):
            with self._changed:
                scheduled = self._scheduler.schedule(max_num_batched_tokens - num_batched_tokens, served)
            if not scheduled:
                return
            results = run_batch([forward for _, forward in scheduled])
            num_batched_tokens += PASS_TOKENS  # a step of many small passes would keep all others waiting
            for (item, forward), result in zip(scheduled, results, strict=True):
                num_batched_tokens += forward.num_tokens
                with self._changed:
                    self._scheduler.charge(item.ctx.key, forward.num_tokens)
                # One forward per item and step: a long prompt must not use up the budget of the others.
                served.add(item)
                self._advance(item, result)

    def _max_num_batched_tokens(self, served: Collection[WorkItem]) -> int:
        """Return the prefill tokens of this step, by the key that goes next. served: items that do not."""
        rows, limits = Counter(request.ctx.key for request in self._batch.requests), self.limits
        if not rows:
            return limits.max_num_batched_tokens
        (greediest, most), with_decodes = rows.most_common(1)[0], limits.prefill_tokens_with_decodes
        with self._changed:
            waiting, next_is_behind = len(self._scheduler.items), self._scheduler.next_is_behind(greediest, served)
        if 2 * most > rows.total() and next_is_behind:
            return WHOLE_PROMPT
        # In proportion to the queue: many cold prompts would starve behind a few long generations.
        return max(with_decodes, min(limits.max_num_batched_tokens, with_decodes * waiting // rows.total()))

    def _start_waiting(self) -> None:
        """Start waiting items in scheduling order.

        An item that waits for batch rows also blocks later ones that need rows, so it cannot starve; only keys below
        their share of rows pass it.
        """
        rows = Counter(request.ctx.key for request in self._batch.requests)
        with self._changed:
            waiting = self._scheduler.next_waiting(self.limits.max_batch)
            for item in self._scheduler.running:
                rows[item.ctx.key] += item.num_seqs
            keys = {item.ctx.key for item in self._scheduler.waiting if item.num_seqs} | rows.keys()
        blocked: set[str] = set()
        for item in waiting:
            if item.num_seqs and not self._has_rows(item, rows, keys, blocked):
                blocked.add(item.ctx.key)
                continue
            while not self._has_memory(item) and not item.dropped:
                row = self._preempt_for(item)
                if row is None:
                    return
                rows[row.ctx.key] -= 1
                blocked.add(row.ctx.key)
            with self._changed:
                self._scheduler.start(item)
            if self._advance(item, None):
                rows[item.ctx.key] += item.num_seqs

    def _has_rows(self, item: WorkItem, rows: Counter[str], keys: Collection[str], blocked: Collection[str]) -> bool:
        """Return True if the item may start to use rows of the batch.

        rows: in use by each key.
        keys: all that use or wait for rows.
        blocked: keys of items before this one that wait for rows.
        """
        most, key, after = self.limits.max_batch, item.ctx.key, rows.total() + item.num_seqs
        # An item that exceeds max_batch by itself starts in an empty batch.
        if not rows.total() or (after <= most and not blocked):
            return True
        below_share = not rows[key] or rows[key] + item.num_seqs <= _share(most, key, keys)
        return len({key, *keys}) > 1 and key not in blocked and below_share and after <= 2 * most

    def _preempt_for(self, item: WorkItem) -> Request | None:
        """Return the longest row of the key that holds most to the queue, where it is prefilled again; None if none is.

        Its key must have used no less than the item's, and hold more than that with the item: else keys would preempt
        each other in turn. Rows whose exits depend on single tokens stay, since a prefill would not repeat them.
        """
        held: Counter[str] = Counter()
        for request in self._batch.requests:
            held[request.ctx.key] += request.length
        candidates = [one for one in self._batch.requests if isinstance(one.depth, Fixed) and not one.dropped]
        row = max(candidates, key=lambda request: (held[request.ctx.key], request.length), default=None)
        with self._changed:
            for running in self._scheduler.running:
                held[running.ctx.key] += running.num_tokens
            key = item.ctx.key
            if row is None or not self._scheduler.is_behind(key, row.ctx.key):
                return None
            if held[key] + item.num_tokens >= held[row.ctx.key]:
                return None
            row.steps, row.loops = self._prefill(row), row.depth.limit
            row.num_tokens = len(row.prompt) + (row.params.max_tokens or 0)
            self._scheduler.add(row, first=True)
        self._batch.retain(lambda request: request is not row)
        return row

    def _has_memory(self, item: WorkItem) -> bool:
        """Return True if the item fits beside running ones and what they will still allocate, or if it is the first."""
        with self._changed:
            running = list(self._scheduler.running)
        items = [one for one in (item, *running) if one.num_tokens]
        needed = sum(one.num_tokens * self.runner.token_bytes(one.loops) for one in items)
        return self.cache.make_room(needed) or (not len(self._batch) and not running)

    def _advance(self, item: WorkItem, result: Any) -> bool:
        """Send a result to an item; return False and remove it when it is done."""
        # Checked here, too: the item may be cancelled while its forward runs.
        if not item.dropped:
            try:
                item.advance(result)
                return True
            except StopIteration as end:
                self._finish(item, end.value)
            except Exception as error:
                self._finish(item, error)
        item.close()
        with self._changed:
            self._scheduler.remove(item)
        return False

    def _expire(self) -> None:
        """Fail requests past their deadline; drop cancelled ones."""
        now = time.monotonic()
        error = DeadlineError("the request took longer than its deadline")
        with self._changed:
            items = self._scheduler.pop(lambda item: item.dropped or item.ctx.deadline < now)
        for item in items:
            if item.dropped:
                item.close()
            else:
                self._finish(item, error)
        for request in self._batch.requests:
            if request.ctx.deadline < now and not request.dropped:
                # Removed by the next decode step, which owns the KV caches.
                request.cancelled = True
                request.fail(error)


def _share(total: int, key: str, keys: Collection[str]) -> int:
    """Return the share of a key that asks beside the active `keys`."""
    return max(1, total // len({key, *keys}))


def _fail(requests: Sequence[Request], error: Exception) -> None:
    for request in requests:
        request.fail(error)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
