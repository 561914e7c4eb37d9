"""Units of scheduling: work items, requests among them; and output events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from loopwm.core.exit_rules import ExitRule
from loopwm.core.kv_cache import KVCache
from loopwm.text.decoding import MemoryText
from loopwm.text.drafts import Lookup
from serve.engine.forward import ForwardBatch, ForwardGenerator
from serve.engine.sampling import SamplingParams


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Scores:
    """Natural log-probabilities of the model, before temperature.

    chosen: of the emitted token.
    top: token ids with theirs, the most probable first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """Output of one decode step: a token, the end, or both; or an error, which is the last event.

    The end token itself is not emitted, but its loops are.
    """

    token: int | None = None
    loops: int = 0
    scores: Scores | None = None
    finish: Finish | None = None
    error: Exception | None = None


class RequestContext:
    """Call of a client that work items belong to.

    key: rate-limit key, which the scheduler is fair between.
    deadline: time.monotonic() after which the client no longer waits.
    cancelled: nobody reads the results any more.
    exit_stack: closed when the call ends, whatever ends it.
    """

    def __init__(self, key: str = "", deadline: float = math.inf) -> None:
        self.key = key
        self.deadline = deadline
        self.cancelled = False
        self.exit_stack = ExitStack()


@dataclass(eq=False, kw_only=True)
class WorkItem:
    """Unit of scheduling: a generator of forwards, of which one runs at a time, with the callback for its result.

    deliver: receives the result or exception on the engine's thread; must not block.
    num_tokens: tokens whose KV cache the item will hold, each with `loops` loops.
    pending: the forward to run next; None before the start.
    started: time.perf_counter() at which it left its queue; None before.
    """

    steps: ForwardGenerator[Any] | None = None
    deliver: Callable[[Any], None] = lambda result: None
    ctx: RequestContext = field(default_factory=RequestContext)
    num_tokens: int = 0
    loops: int = 1
    pending: ForwardBatch | None = field(default=None, init=False)
    started: float | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    @property
    def num_seqs(self) -> int:
        """Sequences that decode when the item is done."""
        return 0

    @property
    def dropped(self) -> bool:
        """True if nobody waits for the item."""
        return self.cancelled or self.ctx.cancelled

    def advance(self, result: Any) -> None:
        """Send the last result (or exception) into the generator. Raises StopIteration with the item's result."""
        assert self.steps is not None
        self.started = self.started or time.perf_counter()
        self.pending = self.steps.throw(result) if isinstance(result, Exception) else self.steps.send(result)

    def close(self) -> None:
        """Drop the generator: it may refer to this item, which would keep KV caches until a garbage collection."""
        if self.steps is not None:
            self.steps.close()
        self.steps = self.pending = None


@dataclass(eq=False)
class Request(WorkItem):
    """Text to generate. Its forwards prefill the prompt, then it decodes in the running batch.

    prompt: token ids, at least one.
    depth: exit rule of decode steps; prefill runs to its limit.
    start: world state of one row to continue from, before the prompt; its tokens for a remote engine.
    deliver: receives events; must not refer to the request, for the same reason as in `close`.
    siblings: other requests of the same prompt, which decode from its prefill.
    context: text of the tokens before the prompt (`loopwm.text.drafts`), to draft from beside the prompt.
    memory_text: competes with the decoded text.
    lookup: what drafts are of; None before the first decode step.
    output: token ids so far.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    depth: ExitRule
    start: KVCache | tuple[int, ...] | None = None
    siblings: Sequence[Request] = ()
    context: str = ""
    memory_text: MemoryText | None = None
    lookup: Lookup | None = field(default=None, init=False)
    generator: torch.Generator = field(init=False)
    output: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.generator = self.params.generator()

    @property
    def num_seqs(self) -> int:
        return 1 + len(self.siblings)

    @property
    def length(self) -> int:
        """Tokens of the text so far, the world's included."""
        before = self.start.length if isinstance(self.start, KVCache) else len(self.start or ())
        return before + len(self.prompt) + len(self.output)

    @property
    def dropped(self) -> bool:
        return super().dropped and all(sibling.dropped for sibling in self.siblings)

    def emit(self, event: Event, end_token: int) -> bool:
        """Deliver a token of a decode step; return True if generation continues."""
        token = event.token
        assert token is not None
        assert self.lookup is not None
        self.lookup.extend([token])
        if token == end_token:
            event = replace(event, token=None, finish=Finish.STOP)
        else:
            self.output.append(token)
            if len(self.output) == self.params.max_tokens:
                event = replace(event, finish=Finish.LENGTH)
        self.deliver(event)
        if event.finish is not None:
            self.lookup.share(len(self.output) + 1)
        return event.finish is None

    def fail(self, error: Exception) -> None:
        self.deliver(Event(error=error))
