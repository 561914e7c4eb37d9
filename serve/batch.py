"""The running batch: requests join it and leave it at any token.

Rows that go on from one prefix form a cohort of their own, which keeps and reads the prefix once; all others of the
same depth are padded to one length and form one more. A cohort takes one pass for each token.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from loopwm.core import CoreState, ExitRule, Fixed, SharedState
from loopwm.text.modeling import LoopWMForCausalLM, LoopWMOutput
from serve.prefixes import PrefixCache, shared_prefix
from serve.requests import Event, Finish, Request, Scores, Ticket
from serve.sampling import choose

MAX_PREFILL = 2048
"""Tokens of several prompts that may run in one pass: the running batch waits for it."""

MAX_PADDING = 256
"""Padding of such a pass beyond which a pass of its own is cheaper."""

CACHE_BYTES = 256 << 20
"""Keys and values of former prompts that are kept."""


class Passes:
    """A model that appends tokens to states."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        self.model = model.eval()
        self.device = model.device

    def tokens(self, state: CoreState, rows: Sequence[Sequence[int]], depth: ExitRule) -> tuple[Tensor, Tensor]:
        """Appends each row's new tokens; logits (B, V) after the last, and loops (B,)."""
        out = self.run(state, rows, depth)
        assert out.last_hidden_state is not None
        assert out.loops is not None
        return self.model.lm_head(out.last_hidden_state[:, -1]), out.loops

    def run(self, state: CoreState, rows: Sequence[Sequence[int]], depth: ExitRule) -> LoopWMOutput:
        """Appends each row's new tokens, padded in front."""
        length = max(map(len, rows))
        tokens_BL = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=self.device)
        valid_BL = torch.tensor([[column >= length - len(row) for column in range(length)] for row in rows])
        positions, mask = state.extend(valid_BL.to(self.device))
        out: LoopWMOutput = self.model.model(tokens_BL, mask, positions, past_key_values=state, depth=depth)
        return out


class Cohort:
    """Rows of one depth, with one prefix or none."""

    def __init__(
        self, tickets: Sequence[Ticket], state: CoreState, logits_BV: Tensor, loops_B: Tensor, depth: ExitRule
    ) -> None:
        self.tickets = list(tickets)
        self.depth = depth
        self._state = state
        self._logits_BV = logits_BV
        self._loops_B = loops_B

    @property
    def prefix(self) -> CoreState | None:
        """What all rows go on from, if that is kept once."""
        return self._state.prefix if isinstance(self._state, SharedState) else None

    def accepts(self, other: Cohort) -> bool:
        """Whether the other's rows can be joined to these."""
        return self.prefix is other.prefix and self.depth == other.depth

    def join(self, other: Cohort) -> None:
        self.tickets += other.tickets
        self._state = self._state.join(other._state)
        self._logits_BV = torch.cat((self._logits_BV, other._logits_BV))
        self._loops_B = torch.cat((self._loops_B, other._loops_B))

    def step(self, passes: Passes, end_token: int) -> None:
        """One token for every row, delivered at once; rows that are finished or cancelled leave."""
        tokens, loops = self._choose(end_token), self._loops_B.tolist()
        scores = [_scores(*row) for row in zip(self.tickets, self._logits_BV, tokens, strict=True)]
        events = [Event(*row) for row in zip(tokens, loops, scores, strict=True)]
        stay = [i for i, ticket in enumerate(self.tickets) if _deliver(ticket, events[i], end_token)]
        if len(stay) < len(self.tickets):
            stay = _closed_up(stay)
            self.tickets = [self.tickets[i] for i in stay]
            self._state = self._state.move(stay)
        if stay:
            self._logits_BV, self._loops_B = passes.tokens(self._state, [[tokens[i]] for i in stay], self.depth)

    def _choose(self, end_token: int) -> list[int]:
        chosen = []
        for logits_V, ticket in zip(self._logits_BV, self.tickets, strict=True):
            if not ticket.request.may_end(ticket.produced):
                logits_V = logits_V.clone()
                logits_V[end_token] = -torch.inf
            chosen.append(choose(logits_V, ticket.request.sampling, ticket.generator))
        return chosen


def _closed_up(rows: Sequence[int]) -> list[int]:
    """Ascending rows in the order that moves the fewest to make them the first: the last ones fill the holes."""
    count, kept = len(rows), set(rows)
    late = iter(row for row in rows if row >= count)
    return [place if place in kept else next(late) for place in range(count)]


def _scores(ticket: Ticket, logits_V: Tensor, token: int) -> Scores | None:
    """Of this token, as far as the request asks for them."""
    top = ticket.request.top
    if top is None:
        return None
    scores_V = logits_V.float().log_softmax(-1)
    values, ids = scores_V.topk(min(top, len(scores_V)))
    return Scores(float(scores_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _deliver(ticket: Ticket, event: Event, end_token: int) -> bool:
    """Tells a request its token; whether it wants another one."""
    if ticket.cancelled:
        return False
    if event.token == end_token:
        ticket.deliver(Event(loops=event.loops, finish=Finish.STOP))
        return False
    ticket.produced += 1
    finish = Finish.LENGTH if ticket.produced == ticket.request.max_tokens else None
    ticket.deliver(replace(event, finish=finish))
    return finish is None


class Batch:
    """All cohorts. Owned by one thread."""

    def __init__(self, model: LoopWMForCausalLM, end_token: int, cache_bytes: int = CACHE_BYTES) -> None:
        self.cohorts: list[Cohort] = []
        self.cache = PrefixCache(cache_bytes)
        self.passes = Passes(model)
        self._end_token = end_token

    def __len__(self) -> int:
        return sum(len(cohort.tickets) for cohort in self.cohorts)

    @torch.inference_mode()
    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Runs the prompts of new requests, all of which run with the first, in one batch."""
        requests = [ticket.request for ticket in tickets]
        state, logits_BV, loops_B = self._prefill(requests)
        if len(tickets) == 1 and requests[0].start is None and not isinstance(state, SharedState):
            self.cache.put(requests[0].prompt, requests[0].depth.limit, state.fork())
        self._place(Cohort(tickets, state, logits_BV, loops_B, requests[0].depth))

    def _place(self, new: Cohort) -> None:
        """Joins cohorts of about one size, so that every row is copied a few times only, however many come."""
        for cohort in self.cohorts:
            cheap = cohort.prefix is not None or len(cohort.tickets) <= 2 * len(new.tickets)
            if cheap and cohort.accepts(new):
                self.cohorts.remove(cohort)
                cohort.join(new)
                return self._place(cohort)
        return self.cohorts.append(new)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row."""
        for cohort in self.cohorts:
            cohort.step(self.passes, self._end_token)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.tickets]

    def clear(self) -> list[Ticket]:
        """Empties the batch and returns who was in it."""
        tickets = [ticket for cohort in self.cohorts for ticket in cohort.tickets]
        self.cohorts = []
        return tickets

    def _after(self, prefix: CoreState | None, rows: int) -> CoreState:
        """Rows that go on from a prefix, which is kept once only if there are others that share it."""
        if prefix is None:
            return CoreState(rows, self.passes.device)
        if rows == 1 and not any(cohort.prefix is prefix for cohort in self.cohorts):
            return prefix.select(torch.tensor([0], device=self.passes.device))
        return SharedState(prefix, rows)

    def _prefill(self, requests: Sequence[Request]) -> tuple[CoreState, Tensor, Tensor]:
        """State after the prompts, logits (B, V) and loops (B,) of their last tokens."""
        prompts, depth = [request.prompt for request in requests], requests[0].depth
        starts = [request.start for request in requests if request.start is not None]
        if starts:
            state = self._continued(starts)
            return state, *self.passes.tokens(state, prompts, depth)
        depth = Fixed(depth.limit)
        prefix = self._prefix(prompts, depth)
        state = self._after(prefix, len(prompts))
        own = [prompt[state.length :] for prompt in prompts]
        return state, *self.passes.tokens(state, own, depth)

    def _continued(self, starts: Sequence[SharedState]) -> CoreState:
        """The states of worlds as one, to be written to."""
        (first, *others), prefix = starts, starts[0].prefix
        if not others and not any(cohort.prefix is prefix for cohort in self.cohorts):
            return first.whole()
        return reduce(CoreState.join, others, first.fork())

    def _prefix(self, prompts: Sequence[tuple[int, ...]], depth: Fixed) -> CoreState | None:
        """What all these prompts begin with, from the cache as far as it is there."""
        shared = shared_prefix(prompts)
        if len(prompts) == 1:
            return self.cache.find(prompts[0], depth.limit)
        if shared == 0:
            return None
        asked = prompts[0][: shared + 1]
        known = self.cache.find(asked, depth.limit)
        if known is None or known.length < shared:
            state = self._after(known, 1)
            self.passes.tokens(state, [asked[state.length : shared]], depth)
            self.cache.put(asked[:shared], depth.limit, state.alone(0))
        return self.cache.find(asked, depth.limit)


def prefill_group(requests: Iterable[Request]) -> list[int]:
    """Which of the requests that wait to run together: the first, and those that go with it, while that is cheap."""
    chosen: list[int] = []
    group: list[Request] = []
    for i, request in enumerate(requests):
        if not group or request.runs_with(group[0]):
            group.append(request)
            if len(group) > 1 and not _fits([r.prompt for r in group]):
                break
            chosen.append(i)
    return chosen


def _fits(group: Sequence[tuple[int, ...]]) -> bool:
    shared = shared_prefix(group)
    lengths = [len(prompt) - shared for prompt in group]
    padded = max(lengths) * len(lengths)
    return padded <= MAX_PREFILL and padded - sum(lengths) <= MAX_PADDING
