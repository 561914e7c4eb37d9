"""The running batch: requests join it and leave it at any token.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from loopwm.core import CoreState
from loopwm.text.modeling import LoopWMForCausalLM
from serve.sampling import Sampling, choose

MIN_SHARED_PREFIX = 16
"""Tokens in common from which on it pays to run them once for all rows, in a pass of their own."""

MAX_PREFILL = 2048
"""Tokens of several prompts that may run in one pass: the running batch waits for it."""

MAX_PADDING = 256
"""Padding of such a pass beyond which a pass of its own is cheaper."""


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. max_tokens: at least 1. The end token is not part of what is generated."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Event:
    """What a request gets to hear: a token, its end, or both; or `error`, after which nothing comes."""

    token: int | None = None
    finish: Finish | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities of the tokens of a prompt and of the one after it.

    chosen: of tokens 1 .. n-1; the first token has none. best, best_scores: the most probable token at 1 .. n and its
    own, where token n is the first that the model would generate.
    """

    chosen: tuple[float, ...]
    best: tuple[int, ...]
    best_scores: tuple[float, ...]


class Ticket:
    """A request on its way through the engine. `deliver` is called on the engine's thread and must not block."""

    def __init__(self, request: Request, deliver: Callable[[Event], None]) -> None:
        self.request = request
        self.deliver = deliver
        self.generator = request.sampling.generator()
        self.produced = 0
        self.cancelled = False


class Batch:
    """Rows that decode together. Owned by one thread."""

    def __init__(self, model: LoopWMForCausalLM, end_token: int, depth: int | None) -> None:
        self.tickets: list[Ticket] = []
        self._model = model.eval()
        self._end_token = end_token
        self._depth = depth
        self._cache = CoreState(0, model.device)
        self._logits_BV = torch.empty(0, model.config.vocab_size, device=model.device)

    def __len__(self) -> int:
        return len(self.tickets)

    @torch.inference_mode()
    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Runs the prompts of new requests as one batch and joins them to the running one."""
        cache, logits_BV = self._prefill([ticket.request.prompt for ticket in tickets])
        if self.tickets:
            cache, logits_BV = self._cache.join(cache), torch.cat((self._logits_BV, logits_BV))
        self.tickets, self._cache, self._logits_BV = [*self.tickets, *tickets], cache, logits_BV

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row, delivered at once; rows that are finished or cancelled leave the batch."""
        tokens = self._choose()
        stay = [row for row, token in enumerate(tokens) if self._advance(self.tickets[row], token)]
        if len(stay) < len(self.tickets):
            self._keep(stay)
        if stay:
            column = torch.tensor([[tokens[row]] for row in stay], device=self._model.device)
            self._logits_BV = self._forward(self._cache, column, torch.ones_like(column).bool())

    @torch.inference_mode()
    def score(self, prompt: tuple[int, ...]) -> TokenScores:
        """Scores the tokens of one prompt in a pass of its own; the rows that decode are not touched."""
        tokens_BL = torch.tensor([prompt], device=self._model.device)
        positions, mask = (cache := CoreState(1, self._model.device)).extend(torch.ones_like(tokens_BL).bool())
        logits_BLV = self._model(tokens_BL, mask, positions, past_key_values=cache, depth=self._depth).logits
        scores_LV = logits_BLV[0].float().log_softmax(-1)
        best_scores, best = scores_LV.max(-1)
        chosen = scores_LV[:-1].gather(-1, tokens_BL[0, 1:, None])[:, 0]
        return TokenScores(*(tuple(values.tolist()) for values in (chosen, best, best_scores)))

    def clear(self) -> list[Ticket]:
        """Empties the batch and returns who was in it."""
        tickets = self.tickets
        self._keep([])
        return tickets

    def _choose(self) -> list[int]:
        rows = zip(self._logits_BV, self.tickets, strict=True)
        return [choose(logits_V, ticket.request.sampling, ticket.generator) for logits_V, ticket in rows]

    def _advance(self, ticket: Ticket, token: int) -> bool:
        """Delivers a token; whether the request wants another one."""
        if ticket.cancelled:
            return False
        if token == self._end_token:
            ticket.deliver(Event(finish=Finish.STOP))
            return False
        ticket.produced += 1
        finish = Finish.LENGTH if ticket.produced == ticket.request.max_tokens else None
        ticket.deliver(Event(token, finish))
        return finish is None

    def _keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self._model.device)
        self.tickets = [self.tickets[row] for row in rows]
        self._cache = self._cache.select(index) if rows else CoreState(0, self._model.device)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[CoreState, Tensor]:
        """Cache after the prompts and logits (B, V) of what follows. What all prompts begin with runs once."""
        device = self._model.device
        shared = shared_prefix(prompts)
        cache = CoreState(len(prompts) if shared == 0 else 1, device)
        if shared:
            column = torch.tensor([prompts[0][:shared]], device=device)
            self._forward(cache, column, torch.ones_like(column).bool())
            cache = cache.select(torch.zeros(len(prompts), dtype=torch.long, device=device))
        rest = [prompt[shared:] for prompt in prompts]
        length = max(map(len, rest))
        tokens_BL = torch.tensor([(0,) * (length - len(row)) + row for row in rest], device=device)
        valid_BL = torch.tensor([[column >= length - len(row) for column in range(length)] for row in rest])
        return cache, self._forward(cache, tokens_BL, valid_BL.to(device))

    def _forward(self, cache: CoreState, tokens_BL: Tensor, valid_BL: Tensor) -> Tensor:
        """Appends new tokens to the cache; logits (B, V) after the last."""
        positions, mask = cache.extend(valid_BL)
        out = self._model(
            tokens_BL, mask, positions, past_key_values=cache, logits_to_keep=1, depth=self._depth
        )  # fmt: skip
        return out.logits[:, -1]


def prefill_group(prompts: Iterable[tuple[int, ...]]) -> int:
    """How many of the first prompts to run together; at least one if there is one."""
    group: list[tuple[int, ...]] = []
    for prompt in prompts:
        group.append(prompt)
        if len(group) > 1 and not _fits(group):
            return len(group) - 1
    return len(group)


def _fits(group: Sequence[tuple[int, ...]]) -> bool:
    shared = shared_prefix(group)
    lengths = [len(prompt) - shared for prompt in group]
    padded = max(lengths) * len(lengths)
    return padded <= MAX_PREFILL and padded - sum(lengths) <= MAX_PADDING


def shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the common beginning worth running once; every prompt keeps at least its last token for itself."""
    if len(prompts) < 2:
        return 0
    longest = min(map(len, prompts)) - 1
    first = prompts[0]
    length = next((i for i in range(longest) if any(prompt[i] != first[i] for prompt in prompts)), longest)
    return length if length >= MIN_SHARED_PREFIX else 0
