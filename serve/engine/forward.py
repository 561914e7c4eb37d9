"""Forward batches of the model.

Everything but decode steps of running requests is a generator that yields the forward it needs and is sent the result.
Forwards with equal keys run as one batch. A prompt is prefilled in chunks, to decode after it or to score its tokens.

Shape suffixes: B rows, L positions, D width, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.core.kv_cache import KVCache, RaggedBatch
from loopwm.runtime import quick_products
from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMOutput, States
from loopwm.text.world_batch import row_of
from serve.engine.prefix_cache import BLOCK, PrefixCache

T = TypeVar("T")

PADDING = 16
"""Chunks whose lengths round up to the same multiple run as one batch; bounds the padding of the shorter ones."""


class ForwardBatch(Protocol):
    """Forward that a work item needs. Inputs must survive `run`, which is repeated after a failed batch."""

    @property
    def key(self) -> Hashable: ...

    @property
    def num_tokens(self) -> int: ...

    def split(self, max_tokens: int) -> Self:
        """Return the first part, of at most `max_tokens` if it can be cut."""

    def run(self, others: Sequence[Any]) -> list[Any]:
        """Run as a batch with `others` of the same type and key; return a result for each."""


ForwardGenerator = Generator[ForwardBatch, Any, T]
"""Generator that yields forwards, is sent their results, and returns T."""


def run_batch(batch: Sequence[ForwardBatch]) -> list[Any]:
    """Run forwards as a batch; if that fails, one by one, so that an error reaches only its own work item."""
    first, *others = batch
    try:
        return first.run(others)
    except Exception as error:
        return [error] if not others else [result for one in batch for result in run_batch([one])]


class ModelRunner:
    """Model that appends tokens to KV caches."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        self.model = model.eval()
        self.device = model.device
        self._token_bytes: dict[int, int] = {}

    def decode(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> tuple[Tensor, Tensor]:
        """Append tokens to each row; return the logits (B, L, V) after each one, and loops (B,)."""
        out = self.run(state, rows, depth)
        assert out.last_hidden_state is not None
        assert out.loops is not None
        with quick_products(out.last_hidden_state.shape[:2].numel()):
            return self.model.lm_head(out.last_hidden_state), out.loops

    def run(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> LoopWMOutput:
        """Append tokens to each row, padded at the end."""
        length = max(map(len, rows))
        tokens_BL = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=self.device)
        valid_BL = torch.tensor([[column < len(row) for column in range(length)] for row in rows])
        positions, mask = state.extend(valid_BL.to(self.device))
        with quick_products(tokens_BL.numel()):
            out: LoopWMOutput = self.model.model(tokens_BL, mask, positions, past_key_values=state, depth=depth)
        return out

    @torch.inference_mode()
    def token_bytes(self, loops: int) -> int:
        """Return the KV-cache bytes per token for `loops` loops."""
        if loops not in self._token_bytes:
            # Measured, not computed: layers and planes per token depend on the configuration.
            state = KVCache(1, self.device)
            self.run(state, [[0]], Fixed(loops))
            self._token_bytes[loops] = state.nbytes()
        return self._token_bytes[loops]


@dataclass(frozen=True)
class PrefillResult:
    """State of one row after a chunk, and the outputs of its tokens, (L, D) each."""

    state: KVCache
    hidden: Tensor
    latent: Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """Forward of prompt tokens of one row, or of the first of them; returns a `PrefillResult`."""

    runner: ModelRunner
    state: KVCache
    ids: Sequence[int]
    loops: int

    @cached_property
    def key(self) -> Hashable:
        return PrefillChunk, self.loops, -(-len(self.ids) // PADDING)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def split(self, max_tokens: int) -> PrefillChunk:
        return self if len(self.ids) <= max_tokens else replace(self, ids=self.ids[: max(max_tokens, 1)])

    @torch.inference_mode()
    def run(self, others: Sequence[PrefillChunk]) -> list[PrefillResult]:
        chunks = (self, *others)
        # Forks, so that a failed batch leaves the states as they were.
        states = [chunk.state.fork() for chunk in chunks]
        batch = RaggedBatch(states) if others else states[0]
        out = self.runner.run(batch, [chunk.ids for chunk in chunks], Fixed(self.loops))
        assert out.last_hidden_state is not None
        assert out.latent is not None
        outputs = (out.last_hidden_state, out.latent)
        return [
            PrefillResult(row_of(states[i], 0), *(output[i, : len(chunk.ids)] for output in outputs))
            for i, chunk in enumerate(chunks)
        ]


def prefill(runner: ModelRunner, cache: PrefixCache, ids: tuple[int, ...], loops: int) -> ForwardGenerator[KVCache]:
    """Return the state after `ids`: one row that shares no memory it will write to. Runs only uncached tokens."""
    state = cache.get_prompt(ids, loops) or KVCache(1, runner.device)
    cached = state.length
    state.reserved = len(ids)
    state = yield from extend(runner, state, ids[state.length :], loops)
    # A prefix that grew by less than a block is not worth a second entry.
    if state.length >= cached + BLOCK or cached == 0:
        cache.put_prompt(ids, loops, state.fork())
    return state


def extend(runner: ModelRunner, state: KVCache, ids: Sequence[int], loops: int) -> ForwardGenerator[KVCache]:
    """Return a state of one row with `ids` appended."""
    while ids:
        result: PrefillResult = yield PrefillChunk(runner, state, ids, loops)
        state, ids = result.state, ids[len(result.hidden) :]
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


def score(
    runner: ModelRunner, prompt: tuple[int, ...], depth: Fixed, top: int, state: KVCache | None = None
) -> ForwardGenerator[TokenScores]:
    """Score the tokens of a prompt.

    top: number of alternatives at each position. state: of one row before the prompt, which stays as it is.
    """
    if state is None:
        state = KVCache(1, runner.device)
        state.reserved = len(prompt)
    chosen: list[float] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    while rest := prompt[len(tops) :]:
        result: PrefillResult = yield PrefillChunk(runner, state, rest, depth.limit)
        state = result.state
        scores = _score_chunk(runner, result, rest[1 : len(result.hidden) + 1], max(top, 1))
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
