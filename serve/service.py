"""The service in terms of text and asyncio: prompts in, pieces of text out. Knows neither HTTP nor tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from loopwm.core import ExitRule, Fixed
from serve.engine import Engine
from serve.prompts import Prompt, PromptReader
from serve.requests import Event, Finish, Request
from serve.sampling import Sampling
from serve.scores import TokenScores, score
from serve.text import Detokenizer, StopScanner

DEFAULT_MAX_TOKENS = 512
T = TypeVar("T")


class CompletionTooLongError(ValueError):
    """Prompt and completion together exceed what the model can hold."""


class ModelNotFoundError(LookupError):
    """A request names a model that is not served here."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"The model {asked!r} does not exist; this service has {served!r}")


@dataclass(frozen=True)
class ModelCard:
    """What clients are told about the model. created: seconds since 1970."""

    name: str
    created: int
    max_length: int
    """Most tokens of prompt and completion together."""
    depth: ExitRule
    """Of every pass where a request names none."""


class Service:
    """One model behind an engine."""

    def __init__(
        self, card: ModelCard, engine: Engine, tokenizer: PreTrainedTokenizerFast, prompts: PromptReader
    ) -> None:
        self.card = card
        self.engine = engine
        self.prompts = prompts
        self._tokenizer = tokenizer

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        if name != self.card.name:
            raise ModelNotFoundError(name, self.card.name)

    def start(
        self, prompt: Prompt, sampling: Sampling, max_tokens: int | None = None, stops: Sequence[str] = ()
    ) -> TextStream:
        """Queues a prompt. Raises CompletionTooLongError, QueueFullError or EngineStoppedError."""
        room = self.card.max_length - len(prompt.ids)
        wanted = min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens
        if wanted > room:
            raise CompletionTooLongError(
                f"max_tokens: {wanted} and a prompt of {len(prompt.ids)} tokens exceed the {self.card.max_length} "
                "tokens the model can hold"
            )
        return self.stream(Request(prompt.ids, wanted, sampling, self.card.depth), stops)

    def stream(self, request: Request, stops: Sequence[str]) -> TextStream:
        """Queues a request. Raises QueueFullError or EngineStoppedError."""
        return TextStream(self.engine, request, Detokenizer(self._decode), StopScanner(stops))

    async def score(self, prompts: Sequence[Prompt]) -> list[TokenScores]:
        """Scores the tokens of prompts. Raises QueueFullError, EngineStoppedError or what the model raised."""
        depth = Fixed(self.card.depth.limit)
        return await self.work(score(self.engine.passes, [prompt.ids for prompt in prompts], depth))

    def work(self, steps: Generator[None, None, T]) -> asyncio.Future[T]:
        """What work for the engine returns or raises. Raises QueueFullError or EngineStoppedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
                loop.call_soon_threadsafe(_settle, future, result)

        self.engine.work(steps, deliver)
        return future

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token, special tokens spelt out. A character of several tokens comes with its last one."""
        detokenizer = Detokenizer(lambda some: str(self._tokenizer.decode(list(some))))
        texts = [detokenizer.push(token) for token in ids]
        texts[-1] += detokenizer.flush()
        return texts

    def single_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token by itself; a part of a character becomes U+FFFD."""
        return [str(text) for text in self._tokenizer.batch_decode([[token] for token in ids])]

    def ends(self, token: int) -> bool:
        """Whether the token ends an observation."""
        return token == self._tokenizer.eos_token_id

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _settle(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():  # the client is gone
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class TextStream:
    """The text of one request, piece by piece; iterate it once. Leaving early or `cancel` frees its place."""

    def __init__(self, engine: Engine, request: Request, detokenizer: Detokenizer, scanner: StopScanner) -> None:
        self.tokens = 0
        self.loops: list[int] = []
        self.finish = Finish.STOP
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._ticket = engine.submit(request, self._deliver)

    def cancel(self) -> None:
        """The iteration ends as if no more tokens came."""
        self._engine.cancel(self._ticket)
        self._events.put_nowait(Event(finish=Finish.STOP))

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text, none empty. Raises what the engine raised.

        `tokens`, `finish` and `loops`, one number for each token and for the end mark, are final afterwards.
        """
        try:
            async for token in self._read():
                self.tokens += 1
                if piece := self._scanner.push(self._detokenizer.push(token)):
                    yield piece
                if self._scanner.stopped:
                    break
            if piece := self._scanner.push(self._detokenizer.flush()) + self._scanner.flush():
                yield piece
            if self._scanner.stopped:
                self.finish = Finish.STOP
        finally:
            self._engine.cancel(self._ticket)

    async def text(self) -> str:
        return "".join([piece async for piece in self])

    async def _read(self) -> AsyncIterator[int]:
        while True:
            event = await self._events.get()
            if event.error is not None:
                raise event.error
            self.loops.append(event.loops)
            if event.token is not None:
                yield event.token
            if event.finish is not None:
                self.finish = event.finish
                return

    def _deliver(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
