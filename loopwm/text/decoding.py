"""Decoding: greedy for a padded batch, or beam search over forks of each row's keys and values.

The score of a hypothesis is the sum of the log-probabilities of its tokens, the end mark included. That is
`length_penalty: 0` of vLLM and transformers, so the search returns the most probable text. vLLM's default of 1 divides
by the number of tokens of prompt and text together.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loopwm.core import KVCache, RaggedBatch
from loopwm.text.model.modeling import States


@dataclass(frozen=True)
class Decoded:
    """A decoded observation, and the loops of each of its tokens, the end mark's last.

    ended: True if the end mark was reached, False if the text was cut at `max_new_tokens`. log_probability: of the
    tokens with the end mark.
    """

    text: str
    loops: tuple[int, ...]
    ended: bool
    log_probability: float = field(compare=False)  # sums of a batch and of a row alone differ in the last bits


@dataclass(frozen=True)
class Hypothesis:
    """Chosen tokens without the end mark, and the loops of each token and of the mark.

    log_probability: the score. ended: the end mark was chosen.
    """

    tokens: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    log_probability: float = 0.0
    ended: bool = False


Forward = Callable[[States, Sequence[int], int, Sequence[int]], tuple[Tensor, list[int]]]
"""Appends one token to each row of a state, in place.

(state, tokens, number of tokens chosen before, rows of the batch) -> logits (B, V) and the loops of each row.
"""


def decode_greedily(forward: Forward, state: KVCache, first: int, max_new_tokens: int, end: int) -> list[Hypothesis]:
    """Take the most probable token until the end mark, for every row of a state.

    Args:
        forward: appends tokens to the state.
        state: of the rows, changed in place.
        first: the token that comes before the text.
        max_new_tokens: of each text.
        end: id of the end mark.
    """
    chosen: list[list[int]] = [[] for _ in range(len(state.valid))]
    loops_of: list[list[int]] = [[] for _ in chosen]
    scores = [0.0] * len(chosen)
    rows, going = list(range(len(chosen))), set(range(len(chosen)))
    tokens = [first] * len(rows)
    for step in range(max_new_tokens):
        if 2 * len(going) <= len(rows):  # dropping rows copies the caches, so wait for half
            places = [i for i, row in enumerate(rows) if row in going]
            rows, tokens = [rows[i] for i in places], [tokens[i] for i in places]
            state = state.select(torch.tensor(places, device=state.valid.device))
        logits_BV, loops = forward(state, tokens, step, rows)
        values_B, tokens_B = logits_BV.float().max(-1)
        tokens, scores_B = tokens_B.tolist(), values_B - logits_BV.float().logsumexp(-1)
        for row, token, count, score in zip(rows, tokens, loops, scores_B.tolist(), strict=True):
            if row in going:
                loops_of[row].append(count)
                scores[row] += score
            if row in going and token != end:
                chosen[row].append(token)
            else:
                going.discard(row)
        if not going:
            break
    texts = enumerate(zip(chosen, loops_of, scores, strict=True))
    return [Hypothesis(tuple(tokens), tuple(loops), score, row not in going) for row, (tokens, loops, score) in texts]


class Extension(NamedTuple):
    """Forward pass requested by a search: one token for each row of a state. step: tokens chosen before."""

    state: KVCache
    tokens: list[int]
    step: int


class Extended(NamedTuple):
    """State after an `Extension`, with logits (B, V) and the loops of each row."""

    state: KVCache
    logits: Tensor
    loops: Sequence[int]


Search = Generator[Extension, Extended, list[Hypothesis]]


def search_beams(state: KVCache, first: int, beams: int, max_new_tokens: int, end: int, results: int = 1) -> Search:
    """Search the most probable texts after a state of one row; yield the passes needed, return the best texts.

    The beam holds the `beams` best hypotheses, ended ones among them: a score only falls as a text goes on, so one that
    has ended and is best stays so. With one beam this is greedy decoding.

    Args:
        state: forks of it must be cheap: a cache with a prefix, which is kept and read once for all beams.
        first: the token that comes before the text.
        beams: hypotheses that are kept.
        max_new_tokens: of each text.
        end: id of the end mark.
        results: return this many hypotheses, best first; the search stops when these have ended.
    """
    beam, tokens = [Hypothesis()], [first]
    for step in range(max_new_tokens):
        state, logits_BV, loops = yield Extension(state, tokens, step)
        ended = [(hypothesis, -1) for hypothesis in beam if hypothesis.ended]  # they have no row in the state any more
        running = [hypothesis for hypothesis in beam if not hypothesis.ended]
        candidates = ended + _extensions(running, logits_BV, loops, min(beams, logits_BV.shape[-1]), end)
        # Stable: among equals, those that ended earlier and more probable prefixes stay first.
        candidates = sorted(candidates, key=lambda candidate: -candidate[0].log_probability)[:beams]
        beam = [hypothesis for hypothesis, _ in candidates]
        if all(hypothesis.ended for hypothesis in beam[:results]):
            break
        parents = [parent for hypothesis, parent in candidates if not hypothesis.ended]
        tokens = [hypothesis.tokens[-1] for hypothesis in beam if not hypothesis.ended]
        if parents != list(range(len(state.valid))):  # the same rows in order need no copy
            state = state.select(torch.tensor(parents, device=state.valid.device))
    return beam[:results]


def _extensions(
    running: Sequence[Hypothesis], logits_BV: Tensor, loops: Sequence[int], count: int, end: int
) -> list[tuple[Hypothesis, int]]:
    """Extend each hypothesis by each of its `count` most probable tokens; return them with their rows."""
    # Rank by logits: log-softmax may round two of them to equals, and then the order would differ from argmax.
    values_BK, tokens_BK = logits_BV.float().topk(count)
    scores_BK = values_BK.double() - logits_BV.double().logsumexp(-1, keepdim=True)
    extensions = []
    for row, (hypothesis, tokens, scores) in enumerate(
        zip(running, tokens_BK.tolist(), scores_BK.tolist(), strict=True)
    ):
        deeper = replace(hypothesis, loops=(*hypothesis.loops, loops[row]))
        for token, score in zip(tokens, scores, strict=True):
            total = hypothesis.log_probability + score
            if token == end:
                extensions.append((replace(deeper, log_probability=total, ended=True), row))
            else:
                extensions.append((replace(deeper, log_probability=total, tokens=(*hypothesis.tokens, token)), row))
    return extensions


def run_searches(searches: Sequence[Search], forward: Forward) -> list[Hypothesis]:
    """Run a search for each row of a batch, token by token in one pass, and return the best hypothesis of each."""
    best: dict[int, Hypothesis] = {}
    passes = {row: next(search) for row, search in enumerate(searches)}
    while passes:
        answers = _extend(passes, forward)
        passes = {}
        for row, answer in answers.items():
            try:
                passes[row] = searches[row].send(answer)
            except StopIteration as stop:
                best[row] = stop.value[0]
    return [best[row] for row in range(len(searches))]


def _extend(passes: Mapping[int, Extension], forward: Forward) -> dict[int, Extended]:
    """Run passes together, by row. All are of one step."""
    tokens = [token for each in passes.values() for token in each.tokens]
    rows = [row for row, each in passes.items() for _ in each.tokens]
    step = next(iter(passes.values())).step
    logits_BV, loops = forward(RaggedBatch([each.state for each in passes.values()]), tokens, step, rows)
    end, answers = 0, {}
    for row, each in passes.items():
        part = slice(end, end := end + len(each.tokens))
        answers[row] = Extended(each.state, logits_BV[part], loops[part])
    return answers
