"""Text-generation service on asyncio: prompts in, text deltas out. Knows neither HTTP nor tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from loopwm.core.exit_rules import RULES, ExitRule, numbers_of, read_rule
from loopwm.records.template import FormatError
from serve.engine.engine import DeadlineError as DeadlineError
from serve.engine.engine import Engine
from serve.engine.engine import EngineStoppedError as EngineStoppedError
from serve.engine.engine import QueueFullError as QueueFullError
from serve.engine.forward import ForwardGenerator
from serve.engine.forward import TokenScores as TokenScores
from serve.engine.remote import RemoteEngineError as RemoteEngineError
from serve.engine.requests import Request, WorkItem
from serve.engine.requests import RequestContext as RequestContext
from serve.engine.sampling import SamplingParams as SamplingParams
from serve.generation.detokenizer import Detokenizer
from serve.generation.metrics import Metrics
from serve.generation.prompts import Prompt, PromptReader
from serve.generation.rate_limits import RateLimiter, RateLimitError
from serve.generation.streams import TextStream

DEFAULT_MAX_TOKENS = 512
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Bytes of the letters in a byte-level vocabulary."""

DEPTH_RULES = tuple(name for name, rule in RULES.items() if numbers_of(name) and not rule.depends_on_batch)
"""Exit rules that a request may name."""

Depth = int | Mapping[str, Any]
"""Number of loops, or an exit rule: its name (`rule`) and its numbers."""

T = TypeVar("T")


def depth_rule(name: str) -> tuple[str, str | None, Mapping[str, type]]:
    """Return the title, description and number fields of an exit rule."""
    rule = RULES[name]
    return rule.__name__, rule.__doc__, numbers_of(name)


class EngineUnsupportedError(FormatError):
    """The request needs what the service's engine does not do."""


class CompletionTooLongError(ValueError):
    """Prompt and completion exceed the model's context."""


class ModelNotFoundError(LookupError):
    """The request names another model."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"The model {name!r} does not exist; this service has {', '.join(map(repr, served))}")


@dataclass(frozen=True)
class ModelCard:
    """Description of the served model.

    names: what requests call it; responses have the first.
    created: seconds since 1970.
    max_length: most tokens of prompt and completion together.
    depth: exit rule of requests that name none.
    """

    names: Sequence[str]
    created: int
    max_length: int
    depth: ExitRule

    @property
    def name(self) -> str:
        return self.names[0]


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
        self.draining = False
        self.prompts = prompts
        self.metrics = Metrics(card.name, lambda: engine.load, engine.cache, self.rate_limiter.used)
        self._tokenizer = tokenizer
        # Decoded once: log-probabilities look up the texts of many single tokens.
        vocabulary = range(len(tokenizer))
        self._texts = [str(text) for text in tokenizer.batch_decode([[token] for token in vocabulary])]
        self._spellings = [str(spelling) for spelling in tokenizer.convert_ids_to_tokens(list(vocabulary))]
        self._special = frozenset(tokenizer.all_special_ids)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for another model's name; None is any model."""
        if name is not None and name not in self.card.names:
            raise ModelNotFoundError(name, self.card.names)

    def admit(self, key: str, seconds: float) -> RequestContext:
        """Admit a request. Raises RateLimitError, or like `Engine.admit`."""
        self.rate_limiter.check(key, "tokens")
        most = self.rate_limiter.quota(key).concurrent
        if most is not None and self.engine.admitted[key] >= most:
            raise RateLimitError(f"{most} requests of this key run already; retry when one has ended", "concurrent", 1)
        return self.engine.admit(key, seconds)

    def charge(self, ctx: RequestContext, tokens: int) -> None:
        """Charge prompt or generated tokens to the request's key."""
        self.rate_limiter.charge(ctx.key, "tokens", tokens)

    def rule(self, depth: Depth | None) -> ExitRule:
        """Return the exit rule of a request, or the service's own.

        Raises:
            FormatError: invalid numbers, or a rule that the checkpoint does not support.
        """
        if depth is None:
            return self.card.depth
        try:
            return self.engine.check_depth(read_rule(depth))
        except ValueError as error:
            raise FormatError("depth", str(error).removeprefix("depth: ")) from error
        except NotImplementedError as error:
            raise EngineUnsupportedError("depth", str(error)) from error

    def start(
        self, ctx: RequestContext, prompt: Prompt, depth: Depth | None, choices: Sequence[SamplingParams]
    ) -> list[TextStream]:
        """Queue the completions of a prompt. Raises CompletionTooLongError, FormatError or EngineStoppedError."""
        rule = self.rule(depth)
        return self.streams(ctx, [Request(prompt.ids, self._fitted(params, prompt), rule) for params in choices])

    def _fitted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """Resolve `max_tokens`, and check it against the prompt."""
        room = self.card.max_length - len(prompt.ids)
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise CompletionTooLongError(
                f"max_tokens: must be at most {room} with a prompt of {len(prompt.ids)} tokens and a context of "
                f"{self.card.max_length}, got {max_tokens}"
            )
        if params.min_tokens > max_tokens:
            raise FormatError("min_tokens", f"must be at most max_tokens ({max_tokens}), got {params.min_tokens}")
        return replace(params, max_tokens=max_tokens)

    def streams(self, ctx: RequestContext, requests: Sequence[Request]) -> list[TextStream]:
        """Queue requests that share one prompt. Raises EngineStoppedError."""
        self.charge(ctx, len(requests[0].prompt))
        streams = []
        for request in requests:
            request.ctx = ctx
            detokenizer = Detokenizer(self._decode, request.params.stops, request.params.min_tokens)
            streams.append(TextStream(request, detokenizer, self.engine, self.metrics, partial(self.charge, ctx)))
        self.engine.submit(requests)
        return streams

    async def score(
        self, ctx: RequestContext, prompts: Sequence[Prompt], depth: ExitRule, top: int
    ) -> list[TokenScores]:
        """Score the tokens of prompts at the rule's limit. Raises EngineStoppedError, or an error of the model."""
        self.charge(ctx, sum(len(prompt.ids) for prompt in prompts))
        loops = depth.limit
        futures = [
            self.work(ctx, self.engine.score(prompt.ids, loops, top), len(prompt.ids), loops) for prompt in prompts
        ]
        return list(await asyncio.gather(*futures))

    def work(
        self, ctx: RequestContext, steps: ForwardGenerator[T], num_tokens: int = 0, loops: int = 1
    ) -> asyncio.Future[T]:
        """Queue a work item. Raises EngineStoppedError.

        num_tokens: tokens whose KV cache the item will hold, each with `loops` loops.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | Exception) -> None:
            self.engine.call_on(loop, partial(_resolve, future, result))

        self.engine.add(WorkItem(steps=steps, deliver=deliver, ctx=ctx, num_tokens=num_tokens, loops=loops))
        return future

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return a text per token, special tokens included. A character of several tokens comes with its last one."""
        detokenizer = Detokenizer(self.decode)
        texts = [detokenizer.push(token) for token in ids]
        texts[-1] += detokenizer.flush()
        return texts

    def single_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself; a part of a character becomes U+FFFD."""
        return [self._texts[token] for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        spelling = self._spellings[token]
        if token in self._special:
            return spelling.encode()
        return bytes(BYTES[letter] for letter in spelling)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self._texts[ids[0]] if len(ids) == 1 else str(self._tokenizer.decode(list(ids)))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _resolve(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():  # cancelled: the client disconnected
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
