"""Streams of generated text: token ids from the engine's thread become text on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from serve.engine.engine import Engine
from serve.engine.requests import Event, Request, RequestContext
from serve.engine.requests import Finish as Finish
from serve.engine.requests import Scores as Scores
from serve.generation.detokenizer import Detokenizer, StopScanner
from serve.generation.metrics import RequestTimer

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
        self, request: Request, detokenizer: Detokenizer, timer: RequestTimer, charge: Callable[[int], None]
    ) -> None:
        """Create a stream for a request to submit with `submit`.

        charge: called with the number of generated tokens.
        """
        self.tokens = 0
        self.loops: list[int] = []
        self.finish = Finish.STOP
        self.end_score: float | None = None
        self._request, self._timer = request, timer
        self._detokenizer, self._charge = detokenizer, charge
        self._scanner = StopScanner(request.params.stops)
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def cancel(self) -> None:
        self._request.cancelled = True

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield deltas with text, and a last one with the rest. Raises errors of the engine."""
        new_tokens: list[Token] = []
        length = 0
        outcome: str | None = "cancelled"
        try:
            async for event in self._read():
                assert event.token is not None
                self.tokens += 1
                self._charge(1)
                new_tokens.append(Token(event.token, length, event.loops, event.scores))
                text = self._detokenizer.push(event.token)
                length += len(text)
                if emitted := self._scan(text):
                    yield TextDelta(emitted, tuple(new_tokens))
                    new_tokens = []
                if self._scanner.stopped:
                    break
            rest = self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
            if self._scanner.stopped:
                self.finish = Finish.STOP
            # Recorded before the last delta: its reader may stop there.
            outcome = None
            self._timer.record_end(self.finish, self.tokens)
            yield TextDelta(rest, tuple(new_tokens))
        except Exception:
            outcome = "error"
            raise
        finally:
            self.cancel()
            if outcome is not None:
                self._timer.record_abort(outcome)

    def _scan(self, text: str) -> str:
        """Return the text to emit. Stop strings count only after `min_tokens`."""
        return text if self.tokens <= self._request.params.min_tokens else self._scanner.push(text)

    async def deltas(self) -> list[TextDelta]:
        return [delta async for delta in self]

    async def text(self) -> str:
        return "".join([delta.text async for delta in self])

    async def _read(self) -> AsyncIterator[Event]:
        """Yield events with a token."""
        while True:
            event = await self._events.get()
            if event.error is not None:
                raise event.error
            self.loops.append(event.loops)
            if event.token is not None:
                yield event
            elif event.scores is not None:
                self.end_score = event.scores.chosen
            if event.finish is not None:
                self.finish = event.finish
                return


def submit(engine: Engine, streams: Sequence[TextStream], ctx: RequestContext) -> None:
    """Queue the requests of streams that share one prompt. Raises EngineStoppedError."""
    delivers = [_delivery(stream._events, stream._timer, engine) for stream in streams]
    requests = engine.submit_all([stream._request for stream in streams], delivers, ctx)
    for stream, request in zip(streams, requests, strict=True):
        stream._request = request


def _delivery(events: asyncio.Queue[Event], timer: RequestTimer, engine: Engine) -> Callable[[Event], None]:
    """Return a callback from the engine's thread to a stream's queue.

    It must not refer to the stream, which holds the request: the cycle would keep a world's KV cache in memory until
    the garbage collector runs.
    """
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        timer.record(event)
        engine.call_on(loop, partial(events.put_nowait, event))

    return deliver


def cancel(streams: Sequence[TextStream]) -> None:
    for stream in streams:
        stream.cancel()


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
