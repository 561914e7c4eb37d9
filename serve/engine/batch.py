"""Running batch: requests that decode, joining and leaving at any token.

Requests that continue one shared prefix form a group, which reads its KV cache once; all others are groups of one.
Groups of one depth share one forward per token.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from loopwm.core import ExitRule, KVCache, RaggedBatch, SharedPrefixCache
from serve.engine.forward import ModelRunner
from serve.engine.requests import Event, Request, Scores
from serve.engine.sampling import sample

log = logging.getLogger(__name__)


class PrefixGroup:
    """Running requests of one depth that share a prefix, or a single request.

    state: KV cache, a row for each request.
    tokens: next input token of each request.
    """

    def __init__(self, requests: Sequence[Request], state: KVCache, tokens: Sequence[int]) -> None:
        self.requests, self.state, self.tokens = list(requests), state, list(tokens)
        self.depth: ExitRule = requests[0].depth

    def accepts(self, state: KVCache, depth: ExitRule) -> bool:
        """Return True if rows of `state` share the group's prefix and depth."""
        if not isinstance(self.state, SharedPrefixCache) or not isinstance(state, SharedPrefixCache):
            return False
        return self.state.prefix is state.prefix and self.depth == depth

    def add(self, request: Request, state: KVCache) -> None:
        self.state = self.state.join(state, in_place=True)
        self.requests.append(request)
        self.tokens.append(request.prompt[-1])

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all requests but these rows, given in ascending order."""
        if 0 < len(rows) < len(self.requests):
            rows = _compact(rows)
            self.state = self.state.move(rows)
        self.requests, self.tokens = [self.requests[i] for i in rows], [self.tokens[i] for i in rows]

    def sample(self, logits_BV: Tensor, loops: Sequence[int], end_token: int) -> None:
        """Sample and emit one token per request; remove finished requests."""
        rows = []
        for i, (request, logits_V) in enumerate(zip(self.requests, logits_BV, strict=True)):
            try:
                token = _sample(request, logits_V, end_token)
                event = Event(token, loops[i], _scores(request, logits_V, token))
            except Exception as error:
                log.exception("sampling failed")
                request.fail(error)
                continue
            self.tokens[i] = token
            if request.emit(event, end_token):
                rows.append(i)
        self.keep(rows)


class RunningBatch:
    """All groups that decode. Owned by the engine's thread."""

    def __init__(self, runner: ModelRunner, end_token: int) -> None:
        self.groups: list[PrefixGroup] = []
        self._runner = runner
        self._end_token = end_token

    def __len__(self) -> int:
        return sum(len(group.requests) for group in self.groups)

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.groups for request in group.requests]

    @torch.inference_mode()
    def add(self, request: Request, state: KVCache) -> None:
        """Start decoding a request.

        state: KV cache of all but the last token of its prompt.
        """
        for group in self.groups:
            if group.accepts(state, request.depth):
                return group.add(request, state)
        return self.groups.append(PrefixGroup([request], state, [request.prompt[-1]]))

    @torch.inference_mode()
    def step(self) -> None:
        """Run one decode step. If the batched forward fails, retry one by one and fail the requests that fail there."""
        for group in self.groups:
            group.keep([i for i, request in enumerate(group.requests) if not request.cancelled])
        self.groups = [group for group in self.groups if group.requests]
        # Groups of different depths cannot share a forward: the exit rule is one per batch.
        for depth in {group.depth for group in self.groups}:
            self._decode([group for group in self.groups if group.depth == depth], depth)
        self.groups = [group for group in self.groups if group.requests]

    def _decode(self, groups: Sequence[PrefixGroup], depth: ExitRule) -> None:
        # A failed forward may have appended to some layers only; the retry needs the states from before.
        before = [group.state.fork() for group in groups]
        try:
            outputs = self._forward(groups, depth)
        except Exception:
            log.exception("decoding %d requests failed; retrying one by one", sum(len(g.requests) for g in groups))
            return self._decode_one_by_one(groups, before)
        for group, (logits_BV, loops) in zip(groups, outputs, strict=True):
            group.sample(logits_BV, loops, self._end_token)
        return None

    def _forward(self, groups: Sequence[PrefixGroup], depth: ExitRule) -> list[tuple[Tensor, list[int]]]:
        """Return logits (B, V) and loops of each group."""
        rows = [[token] for group in groups for token in group.tokens]
        logits_BV, loops_B = self._runner.decode(RaggedBatch([group.state for group in groups]), rows, depth)
        sizes = [len(group.requests) for group in groups]
        return list(zip(logits_BV.split(sizes), [loops.tolist() for loops in loops_B.split(sizes)], strict=True))

    def _decode_one_by_one(self, groups: Sequence[PrefixGroup], before: Sequence[KVCache]) -> None:
        for group, state in zip(groups, before, strict=True):
            self.groups.remove(group)
            for i, request in enumerate(group.requests):
                try:  # inside, because copying the shared prefix may run out of memory, too
                    single = PrefixGroup([request], state.row(i).whole(), [group.tokens[i]])
                    ((logits_BV, loops),) = self._forward([single], single.depth)
                except Exception as error:
                    request.fail(error)
                else:
                    self.groups.append(single)
                    single.sample(logits_BV, loops, self._end_token)

    def clear(self) -> list[Request]:
        """Remove and return all requests."""
        requests, self.groups = self.requests, []
        return requests


def _compact(rows: Sequence[int]) -> list[int]:
    """Order the rows to keep so that the fewest move: the last ones fill the holes."""
    count, kept_rows = len(rows), set(rows)
    last = iter(row for row in rows if row >= count)
    return [row if row in kept_rows else next(last) for row in range(count)]


def _sample(request: Request, logits_V: Tensor, end_token: int) -> int:
    if not request.may_end():
        logits_V = logits_V.clone()  # a row of the batch's logits, whose scores stay unmasked
        logits_V[end_token] = -torch.inf
    return sample(logits_V, request.params, request.generator)


def _scores(request: Request, logits_V: Tensor, token: int) -> Scores | None:
    top = request.params.logprobs
    if top is None:
        return None
    # Over the unmasked logits in float32: scores are the model's, whatever the sampling parameters.
    scores_V = logits_V.float().log_softmax(-1)
    values, ids = scores_V.topk(min(top, len(scores_V)))
    return Scores(float(scores_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
