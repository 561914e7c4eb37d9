"""The running batch: rows that decode, which join and leave it at any token.

Rows that go on from one prefix, which is kept once, form a group that reads it once; all others are groups of their
own. Those of one depth take one pass for each token, whatever they go on from.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loopwm.core import CoreState, ExitRule, SharedState, StateGroup
from serve.engine.forward import ModelRunner
from serve.engine.requests import Event, Finish, Scores
from serve.engine.requests import Sequence as Row
from serve.engine.sampling import choose

log = logging.getLogger(__name__)


class PrefixGroup:
    """Rows of one depth, with one prefix or none. tokens: that each row runs next, behind what is in `state`."""

    def __init__(self, rows: Sequence[Row], state: CoreState, tokens: Sequence[int]) -> None:
        self.rows, self.state, self.tokens = list(rows), state, list(tokens)
        self.depth: ExitRule = rows[0].request.depth

    def accepts(self, state: CoreState, depth: ExitRule) -> bool:
        """Whether rows of this state share the prefix, so that reading it once serves them too."""
        if not isinstance(self.state, SharedState) or not isinstance(state, SharedState):
            return False
        return self.state.prefix is state.prefix and self.depth == depth

    def take(self, row: Row, state: CoreState) -> None:
        self.state = self.state.absorb(state)
        self.rows.append(row)
        self.tokens.append(row.request.prompt[-1])

    def keep(self, stay: Sequence[int]) -> None:
        """Only these rows, in ascending order, go on."""
        if 0 < len(stay) < len(self.rows):
            stay = _closed_up(stay)
            self.state = self.state.move(stay)
        self.rows, self.tokens = [self.rows[i] for i in stay], [self.tokens[i] for i in stay]

    def deliver(self, logits_BV: Tensor, loops: Sequence[int], end_token: int) -> None:
        """Chooses and delivers each row's token, which it runs next. Who is finished leaves."""
        stay = []
        for i, (row, logits_V) in enumerate(zip(self.rows, logits_BV, strict=True)):
            try:
                token = _choose(row, logits_V, end_token)
                event = Event(token, loops[i], _scores(row, logits_V, token))
            except Exception as error:
                log.exception("choosing a token failed")
                row.deliver(Event(error=error))
                continue
            self.tokens[i] = token
            if _deliver(row, event, end_token):
                stay.append(i)
        self.keep(stay)


class RunningBatch:
    """All groups. Owned by one thread."""

    def __init__(self, forward: ModelRunner, end_token: int) -> None:
        self.groups: list[PrefixGroup] = []
        self._forward = forward
        self._end_token = end_token

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @torch.inference_mode()
    def add(self, row: Row, state: CoreState) -> None:
        """A row that goes on from a state: all that comes before the last token of its prompt."""
        for group in self.groups:
            if group.accepts(state, row.request.depth):
                return group.take(row, state)
        return self.groups.append(PrefixGroup([row], state, [row.request.prompt[-1]]))

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row. Where a pass of all fails, each row takes its own, and who fails there hears it."""
        for group in self.groups:
            group.keep([i for i, row in enumerate(group.rows) if not row.cancelled])
        self.groups = [group for group in self.groups if group.rows]
        for depth in {group.depth for group in self.groups}:
            self._advance([group for group in self.groups if group.depth == depth], depth)
        self.groups = [group for group in self.groups if group.rows]

    def _advance(self, groups: Sequence[PrefixGroup], depth: ExitRule) -> None:
        before = [group.state.fork() for group in groups]
        try:
            told = self._pass(groups, depth)
        except Exception:
            log.exception("decoding %d rows failed: each is tried by itself", sum(len(g.rows) for g in groups))
            return self._one_by_one(groups, before)
        for group, (logits_BV, loops) in zip(groups, told, strict=True):
            group.deliver(logits_BV, loops, self._end_token)
        return None

    def _pass(self, groups: Sequence[PrefixGroup], depth: ExitRule) -> list[tuple[Tensor, list[int]]]:
        """Logits (B, V) and loops of each group."""
        rows = [[token] for group in groups for token in group.tokens]
        logits_BV, loops_B = self._forward.tokens(StateGroup([group.state for group in groups]), rows, depth)
        sizes = [len(group.rows) for group in groups]
        return list(zip(logits_BV.split(sizes), [loops.tolist() for loops in loops_B.split(sizes)], strict=True))

    def _one_by_one(self, groups: Sequence[PrefixGroup], before: Sequence[CoreState]) -> None:
        for group, state in zip(groups, before, strict=True):
            self.groups.remove(group)
            for i, row in enumerate(group.rows):
                try:  # memory may be short even for a row's copy of what it read together with others
                    single = PrefixGroup([row], state.alone(i), [group.tokens[i]])
                    ((logits_BV, loops),) = self._pass([single], single.depth)
                except Exception as error:
                    row.deliver(Event(error=error))
                else:
                    self.groups.append(single)
                    single.deliver(logits_BV, loops, self._end_token)

    def clear(self) -> list[Row]:
        """Empties the batch and returns who was in it."""
        rows, self.groups = self.rows, []
        return rows


def _closed_up(rows: Sequence[int]) -> list[int]:
    """Ascending rows in the order that moves the fewest to make them the first: the last ones fill the holes."""
    count, kept = len(rows), set(rows)
    late = iter(row for row in rows if row >= count)
    return [place if place in kept else next(late) for place in range(count)]


def _choose(row: Row, logits_V: Tensor, end_token: int) -> int:
    if not row.request.may_end(row.produced):
        logits_V = logits_V.clone()
        logits_V[end_token] = -torch.inf
    return choose(logits_V, row.request.sampling, row.generator)


def _scores(row: Row, logits_V: Tensor, token: int) -> Scores | None:
    """Of this token, as far as the request asks for them."""
    top = row.request.top
    if top is None:
        return None
    scores_V = logits_V.float().log_softmax(-1)
    values, ids = scores_V.topk(min(top, len(scores_V)))
    return Scores(float(scores_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _deliver(row: Row, event: Event, end_token: int) -> bool:
    """Tells a request its token; whether it wants another one."""
    if event.token == end_token:
        row.deliver(Event(loops=event.loops, scores=event.scores, finish=Finish.STOP))
        return False
    row.produced += 1
    finish = Finish.LENGTH if row.produced == row.request.max_tokens else None
    row.deliver(replace(event, finish=finish))
    return finish is None
