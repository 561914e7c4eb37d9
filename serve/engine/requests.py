"""A request on its way through the engine: what is asked, what it gets to hear."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from loopwm.core import ExitRule, SharedState
from serve.engine.sampling import Sampling


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. max_tokens: at least 1. The end token is not part of what is generated.

    depth: the prompt runs to its limit; its last token and what is generated leave by it. start: the state of a world,
    one row, that the prompt goes on from, which is one token then. The end token is never chosen before `min_tokens`
    others, nor at all with `ignore_end`. top: how many of the most probable tokens to tell at each place; None for no
    scores. beam_search: requests that are submitted together are the best texts of one search, with a beam for each.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    depth: ExitRule
    start: SharedState | None = None
    min_tokens: int = 0
    ignore_end: bool = False
    top: int | None = None
    beam_search: bool = False

    def may_end(self, produced: int) -> bool:
        """Whether the end token may come after so many others."""
        return not self.ignore_end and produced >= self.min_tokens


@dataclass(frozen=True)
class Scores:
    """Natural log-probabilities of the model itself, before temperature: of a token, and of the most probable ones."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """Token ids with their scores, the most probable first."""


@dataclass(frozen=True)
class Event:
    """What a request gets to hear: a token with the loops behind it, its end, or both; or `error`, after which nothing
    comes. The end token is not delivered, but its loops are. scores: of the token, where they were asked for."""

    token: int | None = None
    loops: int = 0
    scores: Scores | None = None
    finish: Finish | None = None
    error: Exception | None = None


class RequestContext:
    """A client's request, of which there may be several sequences and tasks.

    key: whose share of the model it takes. deadline: when nobody waits for it any more, by time.monotonic().
    """

    def __init__(self, key: str = "", deadline: float = math.inf) -> None:
        self.key = key
        self.deadline = deadline


class Sequence:
    """A request while its tokens are generated. `deliver` is called on the engine's thread and must not block."""

    def __init__(self, request: Request, deliver: Callable[[Event], None], ctx: RequestContext | None = None) -> None:
        self.request = request
        self.deliver = deliver
        self.ctx = ctx or RequestContext()
        self.generator = request.sampling.generator()
        self.produced = 0
        self.cancelled = False
