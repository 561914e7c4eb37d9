"""The service in terms of text and asyncio: prompts in, pieces of text out. Knows neither HTTP nor tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from loopwm.core import ExitRule, Fixed
from loopwm.records.template import SPECIAL_TOKENS, FormatError
from serve.engine.engine import Engine
from serve.engine.jobs import Steps
from serve.engine.outbox import Outbox
from serve.engine.requests import Event, Finish, Request, Scores
from serve.engine.sampling import Sampling
from serve.engine.scores import TokenScores, score
from serve.words.metrics import Meter, Metrics
from serve.words.prompts import Prompt, PromptReader
from serve.words.text import Detokenizer, StopScanner

DEFAULT_MAX_TOKENS = 512
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The bytes that letters stand for in a byte-level vocabulary."""

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


@dataclass(frozen=True)
class Generation:
    """How a prompt is to be continued; the fields are those of serve.engine.requests.Request.

    max_tokens: None for as many as there is room for, up to DEFAULT_MAX_TOKENS. stops: strings that end the text.
    """

    sampling: Sampling
    depth: ExitRule
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    min_tokens: int = 0
    ignore_end: bool = False
    top: int | None = None

    def request(self, prompt: Prompt, max_length: int) -> Request:
        """Raises CompletionTooLongError, and FormatError for more least tokens than most tokens."""
        room = max_length - len(prompt.ids)
        wanted = min(DEFAULT_MAX_TOKENS, room) if self.max_tokens is None else self.max_tokens
        if wanted > room:
            raise CompletionTooLongError(
                f"max_tokens: {wanted} and a prompt of {len(prompt.ids)} tokens exceed the {max_length} tokens the "
                "model can hold"
            )
        if self.min_tokens > wanted:
            raise FormatError("min_tokens", f"{self.min_tokens} is more than the {wanted} tokens there may be")
        start = None
        return Request(prompt.ids, wanted, self.sampling, self.depth, start, self.min_tokens, self.ignore_end, self.top)


class Service:
    """One model behind an engine."""

    def __init__(
        self, card: ModelCard, engine: Engine, tokenizer: PreTrainedTokenizerFast, prompts: PromptReader
    ) -> None:
        self.card = card
        self.engine = engine
        self.prompts = prompts
        self.metrics = Metrics(card.name, lambda: engine.load)
        self._tokenizer = tokenizer

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        if name != self.card.name:
            raise ModelNotFoundError(name, self.card.name)

    def rule(self, asked: ExitRule | None) -> ExitRule:
        """The rule that is asked for, or the service's own. Raises FormatError if the checkpoint cannot follow it."""
        if asked is None:
            return self.card.depth
        try:
            return self.engine.passes.model.model.core.check(asked)
        except ValueError as error:
            raise FormatError("depth", str(error).removeprefix("depth: ")) from error

    def start(self, prompt: Prompt, generation: Generation) -> TextStream:
        """Queues a prompt. Raises as `Generation.request` does, QueueFullError or EngineStoppedError."""
        return self.stream(generation.request(prompt, self.card.max_length), generation.stops)

    def stream(self, request: Request, stops: Sequence[str] = ()) -> TextStream:
        """Queues a request. Raises QueueFullError or EngineStoppedError."""
        meter = self.metrics.watch(len(request.prompt))
        return TextStream(self.engine, request, Detokenizer(self._decode), StopScanner(stops), meter)

    async def score(self, prompts: Sequence[Prompt], depth: ExitRule, top: int) -> list[TokenScores]:
        """Scores the tokens of prompts, which run to the rule's limit.

        Raises QueueFullError, EngineStoppedError or what the model raised.
        """
        ids = [prompt.ids for prompt in prompts]
        return await self.work(score(self.engine.passes, ids, Fixed(depth.limit), top))

    def work(self, steps: Steps[T]) -> asyncio.Future[T]:
        """What work for the engine returns or raises. Raises QueueFullError or EngineStoppedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody listens any more
                loop.call_soon_threadsafe(_settle, future, result)

        job = self.engine.work(steps, deliver)
        future.add_done_callback(lambda done: job.cancel() if done.cancelled() else None)
        return future

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token, special tokens spelt out. A character of several tokens comes with its last one."""
        detokenizer = Detokenizer(self.decode)
        texts = [detokenizer.push(token) for token in ids]
        texts[-1] += detokenizer.flush()
        return texts

    def single_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token by itself; a part of a character becomes U+FFFD."""
        return [str(text) for text in self._tokenizer.batch_decode([[token] for token in ids])]

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text, which may be a part of a character. Special tokens are spelt out."""
        spelling = str(self._tokenizer.convert_ids_to_tokens(token))
        if token in self._tokenizer.all_special_ids:
            return spelling.encode()
        return bytes(BYTES[letter] for letter in spelling)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones spelt out."""
        return str(self._tokenizer.decode(list(ids)))

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients must know to count and to compare tokens, by Hugging Face's names."""
        tokenizer = self._tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": self.card.max_length,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "special_tokens": list(SPECIAL_TOKENS),
            "chat_template": tokenizer.chat_template,
        }

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


async def together(some: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order. Where one raises, or nobody waits any more, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in some]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class Token:
    """A generated token. start: characters of the text before what it adds; loops: behind it; scores: if asked for."""

    id: int
    start: int
    loops: int
    scores: Scores | None


@dataclass(frozen=True)
class Piece:
    """Text that is certain to be shown, perhaps empty, and the tokens that came since the piece before."""

    text: str
    tokens: tuple[Token, ...]


class TextStream:
    """The text of one request, piece by piece; iterate it once. Leaving early frees its place, and so does `cancel`,
    after which nothing more comes."""

    def __init__(
        self, engine: Engine, request: Request, detokenizer: Detokenizer, scanner: StopScanner, meter: Meter
    ) -> None:
        self.tokens = 0
        self.loops: list[int] = []
        self.finish = Finish.STOP
        self._min_tokens = request.min_tokens
        self._meter = meter
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine = engine
        self._ticket = engine.submit(request, _delivery(self._events, meter, engine.outbox))

    def cancel(self) -> None:
        self._engine.cancel(self._ticket)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces with text, and a last one for what is left. Raises what the engine raised.

        `tokens`, `finish` and `loops`, one number for each token and for the end mark, are final afterwards.
        """
        fresh: list[Token] = []
        length = 0
        try:
            async for event in self._read():
                assert event.token is not None
                self.tokens += 1
                fresh.append(Token(event.token, length, event.loops, event.scores))
                text = self._detokenizer.push(event.token)
                length += len(text)
                if shown := self._scan(text):
                    yield Piece(shown, tuple(fresh))
                    fresh = []
                if self._scanner.stopped:
                    break
            rest = self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
            if self._scanner.stopped:
                self.finish = Finish.STOP
            self._meter.end(self.finish, self.tokens)
            yield Piece(rest, tuple(fresh))
        finally:
            self._engine.cancel(self._ticket)

    def _scan(self, text: str) -> str:
        """What may be shown. Stop strings count only behind the least number of tokens."""
        return text if self.tokens <= self._min_tokens else self._scanner.push(text)

    async def pieces(self) -> list[Piece]:
        return [piece async for piece in self]

    async def text(self) -> str:
        return "".join([piece.text async for piece in self])

    async def _read(self) -> AsyncIterator[Event]:
        """Events with a token."""
        while True:
            event = await self._events.get()
            if event.error is not None:
                raise event.error
            self.loops.append(event.loops)
            if event.token is not None:
                yield event
            if event.finish is not None:
                self.finish = event.finish
                return


def _delivery(events: asyncio.Queue[Event], meter: Meter, outbox: Outbox) -> Callable[[Event], None]:
    """From the engine's thread to the queue of a stream. It must not hold the stream, which holds the request: a world
    would stay in memory until the garbage collector finds the circle."""
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        meter.hear(event)
        outbox.put(loop, partial(events.put_nowait, event))

    return deliver


async def interleaved(streams: Sequence[TextStream]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Pieces with the numbers of their streams, as they come; None behind the last of each. Raises what one raises."""
    heard: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def listen(index: int, stream: TextStream) -> None:
        try:
            async for piece in stream:
                heard.put_nowait((index, piece))
            heard.put_nowait((index, None))
        except Exception as error:
            heard.put_nowait((index, error))

    listeners = [asyncio.create_task(listen(index, stream)) for index, stream in enumerate(streams)]
    left = len(listeners)
    try:
        while left:
            index, piece = await heard.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield index, piece
    finally:
        for listener in listeners:
            listener.cancel()
