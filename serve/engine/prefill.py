"""Prompts through the model, in pieces, as tasks: to go on from them, or to score their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopwm.core import CoreState, Fixed
from serve.engine.forward import Appended, ForwardGenerator, ModelRunner, PrefillChunk
from serve.engine.prefix_cache import BLOCK, PrefixCache


def prefill(forward: ModelRunner, cache: PrefixCache, ids: tuple[int, ...], loops: int) -> ForwardGenerator[CoreState]:
    """The state after these tokens, one row that shares nothing it will write to. What the cache knows is not run
    again."""
    state = cache.prompt(ids, loops) or CoreState(1, forward.device)
    known = state.length
    state.reserve(len(ids))
    while state.length < len(ids):
        appended: Appended = yield PrefillChunk(forward, state, ids[state.length :], loops)
        state = appended.state
    if state.length >= known + BLOCK or known == 0:
        cache.put_prompt(ids, loops, state.fork())
    return state


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities of the tokens of a prompt and of those most probable after it.

    chosen: of tokens 1 .. n-1; the first token has none. tops: at 1 .. n the most probable tokens with theirs, at least
    one, the best first, where token n is the first that the model would generate.
    """

    chosen: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def next(self) -> tuple[int, float]:
        """The most probable token behind the prompt."""
        return self.tops[-1][0]


def score(forward: ModelRunner, prompt: tuple[int, ...], depth: Fixed, top: int) -> ForwardGenerator[TokenScores]:
    """top: how many of the most probable tokens to tell at each place."""
    state = CoreState(1, forward.device)
    state.reserve(len(prompt))
    chosen: list[float] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    while state.length < len(prompt):
        begin = state.length
        appended: Appended = yield PrefillChunk(forward, state, prompt[begin:], depth.limit)
        state = appended.state
        told = _scores(forward, appended, prompt[begin + 1 : state.length + 1], max(top, 1))
        chosen += told.chosen
        tops += told.tops
    return TokenScores(tuple(chosen), tuple(tops))


@torch.inference_mode()
def _scores(forward: ModelRunner, appended: Appended, following: Sequence[int], top: int) -> TokenScores:
    """Of a piece of a prompt; following: the tokens behind each of its own, of which the last may be missing."""
    scores_LV = forward.model.lm_head(appended.hidden).float().log_softmax(-1)
    values_LK, ids_LK = scores_LV.topk(min(top, scores_LV.shape[-1]))
    tokens_L = torch.tensor(following, device=forward.device, dtype=torch.long)
    chosen = scores_LV[: len(tokens_L)].gather(-1, tokens_L[:, None])[:, 0]
    rows = zip(ids_LK.tolist(), values_LK.tolist(), strict=True)
    tops = tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)
    return TokenScores(tuple(chosen.tolist()), tops)
