"""The service in terms of text and asyncio: prompts in, pieces of text out. Knows neither HTTP nor tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from loopwm.core import RULES, ExitRule, Fixed, allocated_bytes, make_rule, numbers_of
from loopwm.records.template import SPECIAL_TOKENS, FormatError
from serve.engine.engine import DeadlineError as DeadlineError
from serve.engine.engine import Engine
from serve.engine.engine import EngineStoppedError as EngineStoppedError
from serve.engine.engine import QueueFullError as QueueFullError
from serve.engine.forward import ForwardGenerator
from serve.engine.prefill import TokenScores as TokenScores
from serve.engine.prefill import score
from serve.engine.requests import Request
from serve.engine.requests import RequestContext as RequestContext
from serve.engine.sampling import Sampling
from serve.generation.detokenizer import Detokenizer
from serve.generation.metrics import Metrics
from serve.generation.prompts import Prompt, PromptReader
from serve.generation.rate_limits import RateLimiter
from serve.generation.streams import TextStream, begin

DEFAULT_MAX_TOKENS = 512
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The bytes that letters stand for in a byte-level vocabulary."""

DEPTH_RULES = tuple(name for name, rule in RULES.items() if numbers_of(name) and not rule.depends_on_batch)
"""Rules of depth that a request may name."""

Depth = int | Mapping[str, Any]
"""A number of loops, or the name of a rule (`rule`) with its numbers."""

T = TypeVar("T")


def depth_rule(name: str) -> tuple[str, str | None, Mapping[str, type]]:
    """A rule of depth by its name: a title, what it does, and its numbers."""
    rule = RULES[name]
    return rule.__name__, rule.__doc__, numbers_of(name)


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
    """How a prompt is to be continued; the fields are those of serve.engine.requests.Request and
    serve.engine.sampling.Sampling.

    depth: None for the service's own. max_tokens: None for as many as there is room for, up to DEFAULT_MAX_TOKENS.
    stops: strings that end the text. beam_search: the choices of a prompt are the best texts of one search.
    """

    depth: Depth | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    min_tokens: int = 0
    ignore_end: bool = False
    top: int | None = None
    beam_search: bool = False

    def request(self, prompt: Prompt, max_length: int, rule: ExitRule) -> Request:
        """rule: what `depth` stands for. Raises CompletionTooLongError, and FormatError for more least tokens than most
        tokens."""
        room = max_length - len(prompt.ids)
        wanted = min(DEFAULT_MAX_TOKENS, room) if self.max_tokens is None else self.max_tokens
        if wanted > room:
            raise CompletionTooLongError(
                f"max_tokens: {wanted} and a prompt of {len(prompt.ids)} tokens exceed the {max_length} tokens the "
                "model can hold"
            )
        if self.min_tokens > wanted:
            raise FormatError("min_tokens", f"{self.min_tokens} is more than the {wanted} tokens there may be")
        sampling = Sampling(self.temperature, self.top_p, self.seed, self.top_k, self.min_p)
        return Request(
            prompt.ids,
            wanted,
            sampling,
            rule,
            min_tokens=self.min_tokens,
            ignore_end=self.ignore_end,
            top=self.top,
            beam_search=self.beam_search,
        )


class Service:
    """One model behind an engine."""

    def __init__(
        self,
        card: ModelCard,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        prompts: PromptReader,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self.card = card
        self.rate_limiter = rate_limiter or RateLimiter()
        self.engine = engine
        self.prompts = prompts
        self.metrics = Metrics(card.name, lambda: engine.load)
        self._tokenizer = tokenizer
        every = range(engine.forward.model.config.vocab_size)
        self._texts = [str(text) for text in tokenizer.batch_decode([[token] for token in every])]
        self._spellings = [str(spelling) for spelling in tokenizer.convert_ids_to_tokens(list(every))]
        self._special = frozenset(tokenizer.all_special_ids)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        if name != self.card.name:
            raise ModelNotFoundError(name, self.card.name)

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def stop(self) -> None:
        """Whatever still runs is told so."""
        self.engine.stop()

    @property
    def load(self) -> tuple[int, int]:
        """Rows decoding now, and what waits or runs beside them."""
        return self.engine.load

    def memory(self) -> int:
        """Bytes of keys and values of all that runs and is kept."""
        return allocated_bytes()

    @property
    def max_choices(self) -> int:
        """Of one request."""
        return self.engine.limits.max_batch

    def admit(self, key: str, seconds: float) -> RequestContext:
        """A request comes in. Raises RateLimitError where its key has no tokens left, QueueFullError or
        EngineStoppedError."""
        self.rate_limiter.check(key, "tokens")
        return self.engine.admit(key, seconds)

    def release(self, ctx: RequestContext) -> None:
        self.engine.release(ctx)

    def charge(self, ctx: RequestContext, tokens: int) -> None:
        """To the key of a request, for what the model reads or writes for it."""
        self.rate_limiter.charge(ctx.key, "tokens", tokens)

    async def read(self, read: Callable[[], T]) -> T:
        """What takes time without the model, such as to tokenize a text, in a thread of its own."""
        return await asyncio.to_thread(read)

    def rule(self, asked: Depth | None) -> ExitRule:
        """The rule that is asked for, or the service's own. Raises FormatError for impossible numbers, and if the
        checkpoint cannot follow it."""
        if asked is None:
            return self.card.depth
        try:
            if isinstance(asked, int):
                rule: ExitRule = Fixed(asked)
            else:
                rule = make_rule(asked["rule"], {name: asked[name] for name in asked if name != "rule"})
            return self.engine.forward.model.model.core.check(rule)
        except ValueError as error:
            raise FormatError("depth", str(error).removeprefix("depth: ")) from error

    def start(self, ctx: RequestContext, prompt: Prompt, ways: Sequence[Generation]) -> list[TextStream]:
        """Queues the continuations of a prompt. Raises as `rule` and `Generation.request` do, or EngineStoppedError."""
        requests = [way.request(prompt, self.card.max_length, self.rule(way.depth)) for way in ways]
        return self.streams(ctx, requests, [way.stops for way in ways])

    def streams(
        self, ctx: RequestContext, requests: Sequence[Request], stops: Sequence[Sequence[str]] = ((),)
    ) -> list[TextStream]:
        """Queues requests that go on from one prompt. Raises EngineStoppedError."""
        self.charge(ctx, len(requests[0].prompt))
        made = [
            TextStream(
                request,
                Detokenizer(self._decode),
                some,
                self.metrics.watch(len(request.prompt)),
                partial(self.charge, ctx),
            )
            for request, some in zip(requests, stops, strict=True)
        ]
        begin(self.engine, made, ctx)
        return made

    async def score(
        self, ctx: RequestContext, prompts: Sequence[Prompt], depth: ExitRule, top: int
    ) -> list[TokenScores]:
        """Scores the tokens of prompts, which run to the rule's limit.

        Raises EngineStoppedError or what the model raised.
        """
        self.charge(ctx, sum(len(prompt.ids) for prompt in prompts))
        forward, rule = self.engine.forward, Fixed(depth.limit)
        works = [
            self.work(ctx, score(forward, prompt.ids, rule, top), len(prompt.ids), rule.limit) for prompt in prompts
        ]
        return list(await asyncio.gather(*works))

    def work(self, ctx: RequestContext, steps: ForwardGenerator[T], size: int = 0, loops: int = 1) -> asyncio.Future[T]:
        """What work for the engine returns or raises. size: tokens it will keep, of so many loops each. Raises
        EngineStoppedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        outputs = self.engine.outputs

        def deliver(result: T | Exception) -> None:
            outputs.put(loop, partial(_settle, future, result))

        task = self.engine.work(steps, deliver, ctx, size, loops)
        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        return future

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token, special tokens spelt out. A character of several tokens comes with its last one."""
        detokenizer = Detokenizer(self.decode)
        texts = [detokenizer.push(token) for token in ids]
        texts[-1] += detokenizer.flush()
        return texts

    def single_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token by itself; a part of a character becomes U+FFFD."""
        return [self._texts[token] for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text, which may be a part of a character. Special tokens are spelt out."""
        spelling = self._spellings[token]
        if token in self._special:
            return spelling.encode()
        return bytes(BYTES[letter] for letter in spelling)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones spelt out."""
        return self._texts[ids[0]] if len(ids) == 1 else str(self._tokenizer.decode(list(ids)))

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
