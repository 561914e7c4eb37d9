"""The running batch: requests join it and leave it at any token.

Rows that go on from one prefix, which is kept once, form cohorts, each of which reads it once; all others keep what is
theirs. Those of one depth take one pass for each token, whatever they go on from.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopwm.core import CoreState, ExitRule, Fixed, SharedState, StateGroup, quick_products
from loopwm.text.modeling import LoopWMForCausalLM, LoopWMOutput, States
from serve.engine.prefixes import PrefixCache, shared_prefix
from serve.engine.requests import Event, Finish, Request, Scores, Ticket
from serve.engine.sampling import choose

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

    def tokens(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> tuple[Tensor, Tensor]:
        """Appends each row's new tokens; logits (B, V) after the last, and loops (B,)."""
        out = self.run(state, rows, depth)
        assert out.last_hidden_state is not None
        assert out.loops is not None
        with quick_products(len(rows)):
            return self.model.lm_head(out.last_hidden_state[:, -1]), out.loops

    def run(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> LoopWMOutput:
        """Appends each row's new tokens, padded in front."""
        length = max(map(len, rows))
        tokens_BL = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=self.device)
        valid_BL = torch.tensor([[column >= length - len(row) for column in range(length)] for row in rows])
        positions, mask = state.extend(valid_BL.to(self.device))
        with quick_products(tokens_BL.numel()):
            out: LoopWMOutput = self.model.model(tokens_BL, mask, positions, past_key_values=state, depth=depth)
        return out


class Cohort:
    """Rows of one depth, with one prefix or none. state: after what they have said; logits_BV, loops_B: what came of
    their last tokens."""

    def __init__(self, tickets: Sequence[Ticket], state: CoreState, depth: ExitRule) -> None:
        self.tickets = list(tickets)
        self.state = state
        self.depth = depth
        self.logits_BV = torch.empty(0)
        self.loops_B = torch.empty(0)

    def accepts(self, state: CoreState, depth: ExitRule) -> bool:
        """Whether rows of this state share the prefix, so that reading it once serves them too."""
        if not isinstance(self.state, SharedState) or not isinstance(state, SharedState):
            return False
        return self.state.prefix is state.prefix and self.depth == depth

    def join(self, other: Cohort) -> None:
        """Rows that are as far: both have logits."""
        self.take(other.tickets, [other.state])
        self.logits_BV = torch.cat((self.logits_BV, other.logits_BV))
        self.loops_B = torch.cat((self.loops_B, other.loops_B))

    def take(self, tickets: Sequence[Ticket], states: Sequence[CoreState]) -> None:
        """Rows whose next token comes with that of the others."""
        self.state = self.state.absorb(*states)
        self.tickets += tickets

    def deliver(self, end_token: int) -> list[int]:
        """Chooses and delivers a token for every row. Rows that are finished or cancelled leave; tokens of the rest."""
        tokens, loops = self._choose(end_token), self.loops_B.tolist()
        scores = [_scores(*row) for row in zip(self.tickets, self.logits_BV, tokens, strict=True)]
        events = [Event(*row) for row in zip(tokens, loops, scores, strict=True)]
        stay = [i for i, ticket in enumerate(self.tickets) if _deliver(ticket, events[i], end_token)]
        if len(stay) < len(self.tickets):
            stay = _closed_up(stay)
            self.tickets = [self.tickets[i] for i in stay]
            self.state = self.state.move(stay)
        return [tokens[i] for i in stay]

    def _choose(self, end_token: int) -> list[int]:
        chosen = []
        for logits_V, ticket in zip(self.logits_BV, self.tickets, strict=True):
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


@dataclass(frozen=True, eq=False)
class Newcomer:
    """A request that waits for the next pass. state: all that comes before the last token of its prompt."""

    ticket: Ticket
    state: CoreState

    @property
    def depth(self) -> ExitRule:
        return self.ticket.request.depth

    @property
    def token(self) -> int:
        return self.ticket.request.prompt[-1]


class Batch:
    """All cohorts. Owned by one thread."""

    def __init__(
        self,
        model: LoopWMForCausalLM,
        end_token: int,
        cache_bytes: int = CACHE_BYTES,
        delivered: Callable[[], None] = lambda: None,
    ) -> None:
        """delivered: called when all rows have got their tokens, before the next ones are computed."""
        self.cohorts: list[Cohort] = []
        self._newcomers: list[Newcomer] = []
        self.cache = PrefixCache(cache_bytes)
        self.passes = Passes(model)
        self._end_token = end_token
        self._delivered = delivered

    def __len__(self) -> int:
        return sum(len(cohort.tickets) for cohort in self.cohorts) + len(self._newcomers)

    @torch.inference_mode()
    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Runs the prompts of new requests, all of which run with the first, in one batch."""
        requests = [ticket.request for ticket in tickets]
        if requests[0].start is not None:
            return self._continue(tickets)
        state, logits_BV, loops_B = self._prefill(requests)
        if len(tickets) == 1 and not isinstance(state, SharedState):
            self.cache.put(requests[0].prompt, requests[0].depth.limit, state.fork())
        new = Cohort(tickets, state, requests[0].depth)
        new.logits_BV, new.loops_B = logits_BV, loops_B
        for cohort in self.cohorts:
            if cohort.accepts(state, new.depth):
                return cohort.join(new)
        return self.cohorts.append(new)

    def _continue(self, tickets: Sequence[Ticket]) -> None:
        """Requests that go on from worlds: the last token of their prompts runs with the next one of all others."""
        for ticket in tickets:
            request = ticket.request
            assert request.start is not None
            state = request.start.fork()
            if len(request.prompt) > 1:
                self.passes.tokens(state, [request.prompt[:-1]], request.depth)
            self._newcomers.append(Newcomer(ticket, state))

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row."""
        tokens = {cohort: cohort.deliver(self._end_token) for cohort in self.cohorts}
        self._delivered()
        self.cohorts = [cohort for cohort in self.cohorts if cohort.tickets]
        self._newcomers = [newcomer for newcomer in self._newcomers if not newcomer.ticket.cancelled]
        while self._newcomers:
            cohort, alike = self._cohort_for(self._newcomers[0])
            tokens[cohort] = tokens.get(cohort, []) + [newcomer.token for newcomer in alike]
            self._newcomers = [newcomer for newcomer in self._newcomers if newcomer not in alike]
        for depth in {cohort.depth for cohort in self.cohorts}:
            self._advance([cohort for cohort in self.cohorts if cohort.depth == depth], depth, tokens)

    def _cohort_for(self, first: Newcomer) -> tuple[Cohort, list[Newcomer]]:
        """Where a newcomer now is, and the others who came there with it."""
        known = [cohort for cohort in self.cohorts if cohort.accepts(first.state, first.depth)]
        cohort = known[0] if known else Cohort([first.ticket], first.state, first.depth)
        others = [n for n in self._newcomers if n is not first and cohort.accepts(n.state, n.depth)]
        alike = [first, *others]
        coming = alike if known else others
        if coming:
            cohort.take([n.ticket for n in coming], [n.state for n in coming])
        if not known:
            self.cohorts.append(cohort)
        return cohort, alike

    def _advance(self, cohorts: Sequence[Cohort], depth: ExitRule, tokens: Mapping[Cohort, list[int]]) -> None:
        """The pass of all rows of a depth."""
        rows = [[token] for cohort in cohorts for token in tokens[cohort]]
        logits_BV, loops_B = self.passes.tokens(StateGroup([cohort.state for cohort in cohorts]), rows, depth)
        sizes = [len(cohort.tickets) for cohort in cohorts]
        for cohort, logits, loops in zip(cohorts, logits_BV.split(sizes), loops_B.split(sizes), strict=True):
            cohort.logits_BV, cohort.loops_B = logits, loops

    def clear(self) -> list[Ticket]:
        """Empties the batch and returns who was in it."""
        tickets = [ticket for cohort in self.cohorts for ticket in cohort.tickets]
        tickets += [newcomer.ticket for newcomer in self._newcomers]
        self.cohorts, self._newcomers = [], []
        return tickets

    def _after(self, prefix: CoreState | None, rows: int) -> CoreState:
        """Rows that go on from a prefix, which is kept once only if there are others that share it."""
        if prefix is None:
            return CoreState(rows, self.passes.device)
        if rows == 1 and not any(isinstance(c.state, SharedState) and c.state.prefix is prefix for c in self.cohorts):
            return prefix.select(torch.tensor([0], device=self.passes.device))
        return SharedState(prefix, rows)

    def _prefill(self, requests: Sequence[Request]) -> tuple[CoreState, Tensor, Tensor]:
        """State after the prompts, logits (B, V) and loops (B,) of their last tokens."""
        prompts, depth = [request.prompt for request in requests], Fixed(requests[0].depth.limit)
        prefix = self._prefix(prompts, depth)
        state = self._after(prefix, len(prompts))
        own = [prompt[state.length :] for prompt in prompts]
        return state, *self.passes.tokens(state, own, depth)

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
