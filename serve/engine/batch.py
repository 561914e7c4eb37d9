"""Running batch: requests that decode, joining and leaving at any token.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile

import torch
from torch import Tensor

from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.core.kv_cache import KVCache, RaggedBatch
from loopwm.text.drafts import MOST_DRAFTED, Lookup, SharedText, as_text
from serve.engine.forward import ModelRunner
from serve.engine.requests import Event, Request, Scores
from serve.engine.sampling import sample

log = logging.getLogger(__name__)

MOST_KEYS = 64
"""Keys whose decoded texts are kept to draft from."""

Group = tuple[KVCache, list[Request]]
"""KV cache with a row for each request: those that continue one prefix at one depth, or a single one."""

Output = tuple[list[list[int]], Tensor, list[int]]
"""Input tokens of each row of a group, logits (B, L, V), and loops."""


class RunningBatch:
    """All requests that decode. Owned by the engine's thread.

    The KV cache of a prefix is read once for all requests that continue it. Groups of one depth share one forward per
    token.
    """

    def __init__(self, runner: ModelRunner, end_token: int) -> None:
        self.groups: list[Group] = []
        self._runner = runner
        self._end_token = end_token
        self._shared = lru_cache(MOST_KEYS)(lambda key: SharedText())

    def __len__(self) -> int:
        return sum(len(requests) for _, requests in self.groups)

    @property
    def requests(self) -> list[Request]:
        return [request for _, requests in self.groups for request in requests]

    @torch.inference_mode()
    def add(self, request: Request, state: KVCache) -> None:
        """Start decoding a request, or resume it. state: KV cache of all but the last of its tokens."""
        if request.lookup is None:
            request.lookup = Lookup(self._shared(request.ctx.key), request.context + as_text(request.prompt))
        for i, (shared, requests) in enumerate(self.groups):
            same_prefix = state.prefix is not None and state.prefix is shared.prefix
            if same_prefix and requests[0].depth == request.depth:
                self.groups[i] = shared.join(state, in_place=True), [*requests, request]
                return
        self.groups.append((state, [request]))

    @torch.inference_mode()
    def retain(self, stays: Callable[[Request], bool]) -> None:
        """Remove the requests that do not stay, and their KV caches."""
        groups = (_keep(group, [stays(request) for request in group[1]]) for group in self.groups)
        self.groups = [group for group in groups if group[1]]

    @torch.inference_mode()
    def step(self) -> None:
        """Run one decode step, of one token or more for each request.

        If the batched forward fails, retry one by one and fail the requests that fail there.
        """
        self.retain(lambda request: not request.dropped)
        going: list[Group] = []
        # Groups of different depths cannot share a forward: the exit rule is one per batch.
        for depth in {requests[0].depth for _, requests in self.groups}:
            going += self._decode([group for group in self.groups if group[1][0].depth == depth], depth)
        self.groups = [group for group in going if group[1]]

    def _decode(self, groups: Sequence[Group], depth: ExitRule) -> list[Group]:
        # A failed forward may have appended to some layers only; the retry needs the states from before.
        before = [(state.fork(), requests) for state, requests in groups]
        try:
            outputs = self._forward(groups, depth)
        except Exception:
            log.exception("decoding %d requests failed; retrying one by one", sum(len(group[1]) for group in groups))
            return self._decode_one_by_one(before, depth)
        return [self._sample(group, *output) for group, output in zip(groups, outputs, strict=True)]

    def _forward(self, groups: Sequence[Group], depth: ExitRule) -> list[Output]:
        inputs = [[self._input(request, depth) for request in requests] for _, requests in groups]
        rows = [row for group in inputs for row in group]
        logits_BLV, loops_B = self._runner.decode(RaggedBatch([state for state, _ in groups]), rows, depth)
        sizes = [len(group) for group in inputs]
        return list(
            zip(inputs, logits_BLV.split(sizes), [loops.tolist() for loops in loops_B.split(sizes)], strict=True)
        )

    def _input(self, request: Request, depth: ExitRule) -> list[int]:
        """Return the request's next token, and its draft of those after it if exits do not depend on single tokens."""
        assert request.lookup is not None
        most = MOST_DRAFTED // len(self) if isinstance(depth, Fixed) else 0
        if request.params.max_tokens is not None:
            most = min(most, request.params.max_tokens - len(request.output) - 1)
        return [(request.output or request.prompt)[-1], *takewhile(self._end_token.__ne__, request.lookup.draft(most))]

    def _decode_one_by_one(self, groups: Sequence[Group], depth: ExitRule) -> list[Group]:
        going = []
        for state, requests in groups:
            for i, request in enumerate(requests):
                try:  # inside, because copying the shared prefix may run out of memory, too
                    single = state.row(i).whole(), [request]
                    (output,) = self._forward([single], depth)
                except Exception as error:
                    request.fail(error)
                else:
                    going.append(self._sample(single, *output))
        return going

    def _sample(self, group: Group, inputs: Sequence[list[int]], logits_BLV: Tensor, loops: Sequence[int]) -> Group:
        """Sample and emit tokens of each request; remove finished requests."""
        state, requests = group
        rows = zip(requests, inputs, logits_BLV, loops, strict=True)
        sampled = [self._sample_row(request, given[1:], *output) for request, given, *output in rows]
        if logits_BLV.shape[1] > 1:
            state = state.keep_newest([count for count, _ in sampled], logits_BLV.shape[1])
        return _keep((state, requests), [goes_on for _, goes_on in sampled])

    def _sample_row(self, request: Request, draft: Sequence[int], logits_LV: Tensor, loops: int) -> tuple[int, bool]:
        """Sample and emit tokens as long as they were drafted; return their number, and True if generation continues.

        A token that was drafted is sampled as any other, so that drafts do not change the distribution.
        """
        for count, logits_V in enumerate(logits_LV):
            try:
                token = _sample(request, logits_V, self._end_token)
                event = Event(token, loops, _scores(request, logits_V, token))
            except Exception as error:
                log.exception("sampling failed")
                request.fail(error)
                return count + 1, False
            if not request.emit(event, self._end_token):
                return count + 1, False
            if [token] != list(draft[count : count + 1]):
                break
        return count + 1, True

    def clear(self) -> list[Request]:
        """Remove and return all requests."""
        requests, self.groups = self.requests, []
        return requests


def _keep(group: Group, stays: Sequence[bool]) -> Group:
    """Remove the requests of a group that do not stay."""
    state, requests = group
    rows = [row for row, flag in enumerate(stays) if flag]
    if not rows or len(rows) == len(requests):
        return state, [requests[row] for row in rows]
    # Ordered so that the fewest rows of the KV cache move: the last ones fill the holes.
    last = iter(row for row in rows if row >= len(rows))
    rows = [row if stays[row] else next(last) for row in range(len(rows))]
    return state.move(rows), [requests[row] for row in rows]


def _sample(request: Request, logits_V: Tensor, end_token: int) -> int:
    if request.params.ignore_end or len(request.output) < request.params.min_tokens:
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
