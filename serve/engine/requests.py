"""Engine requests and output events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from loopwm.core import ExitRule, SharedPrefixCache
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
    """Client request that sequences and work items belong to.

    key: rate-limit key, which the scheduler is fair between.
    deadline: time.monotonic() after which the client no longer waits.
    """

    def __init__(self, key: str = "", deadline: float = math.inf) -> None:
        self.key = key
        self.deadline = deadline


@dataclass(eq=False)
class Request:
    """Sequence to generate, and its state while it runs.

    prompt: token ids, at least one.
    depth: exit rule of decode steps; prefill runs to its limit.
    start: world state of one row to continue from; the prompt is one token then.
    deliver: receives events on the engine's thread; must not block, and must not refer to the request: the cycle would
        keep the world's memory until the garbage collector runs.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    depth: ExitRule
    start: SharedPrefixCache | None = None
    deliver: Callable[[Event], None] = lambda event: None
    ctx: RequestContext = field(default_factory=RequestContext)
    generator: torch.Generator = field(init=False)
    num_output_tokens: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.generator = self.params.generator()

    def may_end(self) -> bool:
        """Return True if the end token may be sampled now."""
        return not self.params.ignore_end and self.num_output_tokens >= self.params.min_tokens

    def emit(self, event: Event, end_token: int) -> bool:
        """Deliver the token of a decode step; return True if generation continues."""
        if event.token == end_token:
            self.deliver(Event(loops=event.loops, scores=event.scores, finish=Finish.STOP))
            return False
        self.num_output_tokens += 1
        finish = Finish.LENGTH if self.num_output_tokens == self.params.max_tokens else None
        self.deliver(Event(event.token, event.loops, event.scores, finish))
        return finish is None

    def fail(self, error: Exception) -> None:
        self.deliver(Event(error=error))
