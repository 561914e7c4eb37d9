"""Generated text as it comes: token ids of the engine's thread become pieces of text on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from serve.engine.engine import Engine
from serve.engine.outputs import OutputQueue
from serve.engine.requests import Event, Request, RequestContext
from serve.engine.requests import Finish as Finish
from serve.engine.requests import Scores as Scores
from serve.engine.requests import Sequence as Row
from serve.generation.detokenizer import Detokenizer, StopScanner
from serve.generation.metrics import Meter

T = TypeVar("T")


@dataclass(frozen=True)
class Token:
    """A generated token. start: characters of the text before what it adds; loops: behind it; scores: if asked for."""

    id: int
    start: int
    loops: int
    scores: Scores | None


@dataclass(frozen=True)
class TextDelta:
    """Text that is certain to be shown, perhaps empty, and the tokens that came since the delta before."""

    text: str
    tokens: tuple[Token, ...]


class TextStream:
    """The text of one request, piece by piece; iterate it once. Leaving early frees its place, and so does `cancel`,
    after which nothing more comes."""

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        meter: Meter,
        charge: Callable[[int], None],
    ) -> None:
        """charge: is told of generated tokens."""
        self.tokens = 0
        self.loops: list[int] = []
        self.finish = Finish.STOP
        self.end_score: float | None = None
        self._request, self._meter = request, meter
        self._detokenizer, self._charge = detokenizer, charge
        self._scanner = StopScanner(stops)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._row: Row | None = None

    def cancel(self) -> None:
        if self._row is not None:
            self._row.cancelled = True

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Pieces with text, and a last one for what is left. Raises what the engine raised.

        `tokens`, `finish`, `loops`, one number for each token and for the end mark, and `end_score`, the mark's
        log-probability if scores were asked for, are final afterwards.
        """
        fresh: list[Token] = []
        length = 0
        outcome: str | None = "cancelled"
        try:
            async for event in self._read():
                assert event.token is not None
                self.tokens += 1
                self._charge(1)
                fresh.append(Token(event.token, length, event.loops, event.scores))
                text = self._detokenizer.push(event.token)
                length += len(text)
                if shown := self._scan(text):
                    yield TextDelta(shown, tuple(fresh))
                    fresh = []
                if self._scanner.stopped:
                    break
            rest = self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
            if self._scanner.stopped:
                self.finish = Finish.STOP
            outcome = None
            self._meter.end(self.finish, self.tokens)
            yield TextDelta(rest, tuple(fresh))
        except Exception:
            outcome = "error"
            raise
        finally:
            self.cancel()
            if outcome is not None:
                self._meter.fail(outcome)

    def _scan(self, text: str) -> str:
        """What may be shown. Stop strings count only behind the least number of tokens."""
        return text if self.tokens <= self._request.min_tokens else self._scanner.push(text)

    async def deltas(self) -> list[TextDelta]:
        return [delta async for delta in self]

    async def text(self) -> str:
        return "".join([delta.text async for delta in self])

    async def _read(self) -> AsyncIterator[Event]:
        """Events with a token."""
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


def begin(engine: Engine, streams: Sequence[TextStream], ctx: RequestContext) -> None:
    """Queues the requests of streams, all of which go on from one prompt. Raises EngineStoppedError."""
    delivers = [_delivery(stream._events, stream._meter, engine.outputs) for stream in streams]
    rows = engine.submit_all([stream._request for stream in streams], delivers, ctx)
    for stream, row in zip(streams, rows, strict=True):
        stream._row = row


def _delivery(events: asyncio.Queue[Event], meter: Meter, outputs: OutputQueue) -> Callable[[Event], None]:
    """From the engine's thread to the queue of a stream. It must not hold the stream, which holds the request: a world
    would stay in memory until the garbage collector finds the circle."""
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        meter.hear(event)
        outputs.put(loop, partial(events.put_nowait, event))

    return deliver


def cancel(streams: Sequence[TextStream]) -> None:
    for stream in streams:
        stream.cancel()


async def interleaved(streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, TextDelta | None]]:
    """Pieces with the numbers of their streams, as they come; None behind the last of each. Raises what one raises."""
    heard: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue()

    async def listen(index: int, stream: TextStream) -> None:
        try:
            async for delta in stream:
                heard.put_nowait((index, delta))
            heard.put_nowait((index, None))
        except Exception as error:
            heard.put_nowait((index, error))

    listeners = [asyncio.create_task(listen(index, stream)) for index, stream in enumerate(streams)]
    left = len(listeners)
    try:
        while left:
            index, delta = await heard.get()
            if isinstance(delta, Exception):
                raise delta
            left -= delta is None
            yield index, delta
    finally:
        for listener in listeners:
            listener.cancel()


async def together(some: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order. Where one raises, or nobody waits any more, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in some]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
