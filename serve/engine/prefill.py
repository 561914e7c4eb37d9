"""Chunked prefill as engine work items: to decode after a prompt, or to score its tokens.

Shape suffixes: L positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopwm.core import Fixed, KVCache
from serve.engine.forward import ForwardGenerator, ModelRunner, PrefillChunk, PrefillResult
from serve.engine.prefix_cache import BLOCK, PrefixCache


def prefill(runner: ModelRunner, cache: PrefixCache, ids: tuple[int, ...], loops: int) -> ForwardGenerator[KVCache]:
    """Return the state after `ids`: one row that shares no memory it will write to. Runs only uncached tokens."""
    state = cache.get_prompt(ids, loops) or KVCache(1, runner.device)
    cached = state.length
    state.reserved = len(ids)
    while state.length < len(ids):
        result: PrefillResult = yield PrefillChunk(runner, state, ids[state.length :], loops)
        state = result.state
    # A prefix that grew by less than a block is not worth a second entry.
    if state.length >= cached + BLOCK or cached == 0:
        cache.put_prompt(ids, loops, state.fork())
    return state


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities along a prompt of n tokens.

    chosen: of tokens 1 .. n-1; the first token has none.
    tops: at 1 .. n the most probable tokens with theirs, at least one, best first; n is the first generated token.
    """

    chosen: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def next(self) -> tuple[int, float]:
        """Return the most probable token after the prompt, and its log-probability."""
        return self.tops[-1][0]


def score(runner: ModelRunner, prompt: tuple[int, ...], depth: Fixed, top: int) -> ForwardGenerator[TokenScores]:
    """Score the tokens of a prompt.

    top: number of alternatives at each position.
    """
    state = KVCache(1, runner.device)
    state.reserved = len(prompt)
    chosen: list[float] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    while state.length < len(prompt):
        start = state.length
        result: PrefillResult = yield PrefillChunk(runner, state, prompt[start:], depth.limit)
        state = result.state
        scores = _score_chunk(runner, result, prompt[start + 1 : state.length + 1], max(top, 1))
        chosen += scores.chosen
        tops += scores.tops
    return TokenScores(tuple(chosen), tuple(tops))


@torch.inference_mode()
def _score_chunk(runner: ModelRunner, result: PrefillResult, targets: Sequence[int], top: int) -> TokenScores:
    """Score a prefill chunk.

    targets: the next token of each position; the last one is missing at the end of the prompt.
    """
    scores_LV = runner.model.lm_head(result.hidden).float().log_softmax(-1)
    values_LK, ids_LK = scores_LV.topk(min(top, scores_LV.shape[-1]))
    targets_L = torch.tensor(targets, device=runner.device, dtype=torch.long)
    chosen = scores_LV[: len(targets_L)].gather(-1, targets_L[:, None])[:, 0]
    rows = zip(ids_LK.tolist(), values_LK.tolist(), strict=True)
    tops = tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)
    return TokenScores(tuple(chosen.tolist()), tops)
