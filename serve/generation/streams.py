"""Streams of generated text: token ids from the engine's thread become text on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any, TypeVar

from loopwm.core.exit_rules import Fixed
from loopwm.text.decoding import UNLIKELY, MemoryText, departure
from serve.engine.engine import Engine
from serve.engine.requests import Event, Request, WorkItem
from serve.engine.requests import Finish as Finish
from serve.engine.requests import Scores as Scores
from serve.generation.detokenizer import Detokenizer
from serve.generation.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True)
class Token:
    """Generated token.

    start: offset of its text, in characters.
    loops: loops of its decode step.
    scores: None unless requested.
    """

    id: int
    start: int
    loops: int
    scores: Scores | None


@dataclass(frozen=True)
class TextDelta:
    """Text to emit, perhaps empty, and the tokens since the last delta."""

    text: str
    tokens: tuple[Token, ...]


class TextStream:
    """Text of one request; iterate once. Leaving the iteration early cancels the request.

    After the iteration `tokens`, `finish`, `loops` (of each token and of the end) and `end_score` are final.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        engine: Engine,
        metrics: Metrics,
        charge: Callable[[int], None],
    ) -> None:
        """Create a stream for a request that is not submitted yet.

        charge: called with the number of generated tokens.
        """
        self.tokens = 0
        self.loops: list[int] = []
        self.finish = Finish.STOP
        self.end_score: float | None = None
        self._first, self._detokenizer = request, detokenizer
        self._work: list[WorkItem] = [request]
        self._engine, self._metrics, self._charge = engine, metrics, charge
        self._events: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        self._arrived = self._last = time.perf_counter()
        request.deliver = _delivery(self._events, engine)

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield deltas with text, and a last one with the rest. Raises errors of the engine."""
        new_tokens: list[Token] = []
        outcome: str | None = "cancelled"
        try:
            async for event in self._read():
                assert event.token is not None
                self.tokens += 1
                self._charge(1)
                new_tokens.append(Token(event.token, self._detokenizer.length, event.loops, event.scores))
                if text := self._detokenizer.push(event.token):
                    yield TextDelta(text, tuple(new_tokens))
                    new_tokens = []
                if self._detokenizer.stopped:
                    break
            rest = self._detokenizer.flush()
            if self._detokenizer.stopped:
                self.finish = Finish.STOP
            # Recorded before the last delta: its reader may stop there.
            outcome = None
            seconds = time.perf_counter() - self._arrived
            self._metrics.record_end(self.finish, len(self._first.prompt), self.tokens, seconds)
            yield TextDelta(rest, tuple(new_tokens))
        except Exception:
            outcome = "error"
            raise
        finally:
            for item in self._work:
                item.cancelled = True
            if outcome is not None:
                self._metrics.record_outcome(outcome)

    async def deltas(self) -> list[TextDelta]:
        return [delta async for delta in self]

    async def text(self) -> str:
        return "".join([delta.text async for delta in self])

    async def _read(self) -> AsyncIterator[Event]:
        """Yield events with a token."""
        first = self._first
        likelier = first.params.likelier and isinstance(first.depth, Fixed)
        async for now, event in self._likelier() if likelier else _received(self._events):
            if not self.loops and first.started is not None:
                self._metrics.queue_time.observe(first.started - self._arrived)
            self._metrics.record_token(now - self._last, event, 0 if self.loops else len(first.prompt))
            self._last = now
            self.loops.append(event.loops)
            if event.token is not None:
                yield event
            elif event.scores is not None:
                self.end_score = event.scores.chosen
            if event.finish is not None:
                self.finish = event.finish

    async def _likelier(self) -> AsyncIterator[tuple[float, Event]]:
        """Yield the events of the likeliest text (`loopwm.text.decoding`).

        Those before the first likely second choice and the first difference from what was recalled, which are the same
        in all, come at once, the others at the end.
        """
        memory_text = self._first.memory_text
        events: list[Event] = []
        sent = 0
        async for now, event in _received(self._events):
            same = memory_text is None or memory_text.ids[sent : sent + 1] == (event.token,)
            if sent == len(events) and same and self._second(event)[1] < log(UNLIKELY):
                sent += 1
                yield now, event
            events.append(event)
        scores, ended = _scores(events), events[-1].finish is Finish.STOP
        place = departure(scores, [self._second(event) for event in events], ended)
        if place is not None:
            other = [*events[:place], *await self._depart(events, place)]
            if other[-1].finish is Finish.STOP and not (ended and sum(scores) >= sum(_scores(other))):
                events = other
        if memory_text is not None and len(memory_text.ids) <= (self._first.params.max_tokens or 0):
            events = await self._compare(events, memory_text)
        for event in events[sent:]:
            yield time.perf_counter(), event

    async def _compare(self, events: list[Event], memory_text: MemoryText) -> list[Event]:
        """Return the events of the recalled text if the decoded one is doubtful."""
        ended = events[-1].finish is Finish.STOP
        if ended and memory_text.ids == tuple(event.token for event in events[:-1]):
            return events
        first, end = self._first, self._engine.end_token
        received: asyncio.Queue[Any] = asyncio.Queue()
        loops = first.depth.limit
        steps = self._engine.score((*first.prompt, *memory_text.ids, end), loops, 0, first.start)
        deliver = _delivery(received, self._engine)
        item = WorkItem(steps=steps, deliver=deliver, ctx=first.ctx, num_tokens=len(memory_text.ids), loops=loops)
        self._work.append(item)
        self._engine.add(item)
        _, result = await received.get()
        if isinstance(result, Exception):
            raise result
        scores = result.chosen[len(first.prompt) - 1 :]
        if ended and not memory_text.replaces(sum(_scores(events)), sum(scores)):
            return events
        tokens = [Event(token, loops, Scores(value)) for token, value in zip(memory_text.ids, scores, strict=False)]
        return [*tokens, Event(loops=loops, scores=Scores(scores[-1]), finish=Finish.STOP)]

    async def _depart(self, events: Sequence[Event], place: int) -> list[Event]:
        """Decode the rest of the text that takes the second choice at a place."""
        event = events[place]
        token, score = self._second(event)
        if token == self._engine.end_token:
            return [Event(loops=event.loops, scores=Scores(score), finish=Finish.STOP)]
        first = self._first
        assert first.params.max_tokens is not None
        room = first.params.max_tokens - place - 1
        departing = Event(token, event.loops, Scores(score), None if room else Finish.LENGTH)
        if not room:
            return [departing]
        rest: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        before = [event.token for event in events[:place] if event.token is not None]
        request = Request(
            prompt=(*first.prompt, *before, token),
            params=replace(first.params, max_tokens=room),
            depth=first.depth,
            start=first.start,
            context=first.context,
            deliver=_delivery(rest, self._engine),
            ctx=first.ctx,
        )
        self._work.append(request)
        self._engine.submit([request])
        return [departing, *[event async for _, event in _received(rest)]]

    def _second(self, event: Event) -> tuple[int, float]:
        """Return the second most probable token of a step, and its log-probability."""
        assert event.scores is not None
        chosen = self._engine.end_token if event.token is None else event.token
        return next((token, score) for token, score in event.scores.top if token != chosen)


async def _received(events: asyncio.Queue[tuple[float, Event]]) -> AsyncIterator[tuple[float, Event]]:
    """Yield a request's events up to its end. Raises errors of the engine."""
    event = Event()
    while event.finish is None:
        now, event = await events.get()
        if event.error is not None:
            raise event.error
        yield now, event


def _scores(events: Sequence[Event]) -> list[float]:
    """Return the log-probabilities of a text."""
    return [event.scores.chosen for event in events if event.scores is not None]


def _delivery(events: asyncio.Queue[tuple[float, T]], engine: Engine) -> Callable[[T], None]:
    """Return a callback from the engine's thread to a stream's queue.

    It must not refer to the stream, which holds the request: the cycle would keep a world's KV cache in memory until
    the garbage collector runs.
    """
    loop = asyncio.get_running_loop()
    return lambda event: engine.call_on(loop, partial(events.put_nowait, (time.perf_counter(), event)))


async def interleaved(streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, TextDelta | None]]:
    """Yield (stream index, delta) in order of arrival, and None at the end of each stream. Raises the first error."""
    queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue()

    async def forward(index: int, stream: TextStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            index, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            open_streams -= delta is None
            yield index, delta
    finally:
        for task in tasks:
            task.cancel()


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently and return the results; cancel the rest on an error or cancellation."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
