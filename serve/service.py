"""The service in terms of text and asyncio: prompts in, pieces of text out. Knows neither HTTP nor tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerFast

from serve.batch import Event, Finish, Request, TokenScores
from serve.engine import Engine
from serve.prompts import Prompt, PromptReader
from serve.sampling import Sampling
from serve.text import Detokenizer, StopScanner

DEFAULT_MAX_TOKENS = 512


class CompletionTooLongError(ValueError):
    """Prompt and completion together exceed what the model can hold."""


@dataclass(frozen=True)
class ModelCard:
    """What clients are told about the model. created: seconds since 1970."""

    name: str
    created: int
    max_length: int
    """Most tokens of prompt and completion together."""


class Service:
    """One model behind an engine."""

    def __init__(
        self, card: ModelCard, engine: Engine, tokenizer: PreTrainedTokenizerFast, prompts: PromptReader
    ) -> None:
        self.card = card
        self.engine = engine
        self.prompts = prompts
        self._tokenizer = tokenizer

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
        request = Request(prompt.ids, wanted, sampling)
        return TextStream(self.engine, request, Detokenizer(self._decode), StopScanner(stops))

    async def score(self, prompts: Sequence[Prompt]) -> list[TokenScores]:
        """Scores the tokens of prompts. Raises QueueFullError, EngineStoppedError or what the model raised."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[TokenScores]] = [loop.create_future() for _ in prompts]
        deliver = [partial(_deliver_later, loop, future) for future in futures]
        self.engine.score([prompt.ids for prompt in prompts], deliver)
        return await asyncio.gather(*futures)

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


def _deliver_later(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[TokenScores], result: TokenScores | Exception
) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
        loop.call_soon_threadsafe(_resolve, future, result)


def _resolve(future: asyncio.Future[TokenScores], result: TokenScores | Exception) -> None:
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
        """Pieces of text, none empty. `tokens` and `finish` are final afterwards. Raises what the engine raised."""
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
            if event.token is not None:
                yield event.token
            if event.finish is not None:
                self.finish = event.finish
                return

    def _deliver(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
