"""Choosing tokens: greedily for a padded batch, or by beam search over forks of each row's keys and values.

Score of a hypothesis: the sum of the log-probabilities of its tokens, the end mark included. That is
`length_penalty: 0` of vLLM and transformers, so the search looks for the most probable text. vLLM's default of 1
divides by the number of tokens of prompt and text together.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loopwm.core import KVCache, RaggedBatch
from loopwm.text.model.modeling import States


@dataclass(frozen=True)
class Decoded:
    """A decoded observation, and the loops behind each of its tokens; that of the end mark comes last.

    ended: the end mark came; otherwise the text is cut at the most tokens that were asked for."""

    text: str
    loops: tuple[int, ...]
    ended: bool


@dataclass(frozen=True)
class Hypothesis:
    """Chosen tokens without the end mark; the loops behind each token and behind the mark.

    log_probability: the score, 0 where tokens are chosen greedily. ended: the end mark was chosen.
    """

    tokens: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    log_probability: float = 0.0
    ended: bool = False


Forward = Callable[[States, Sequence[int], int, Sequence[int]], tuple[Tensor, list[int]]]
"""Appends one token to each row of a state, which it changes: (state, tokens, how many tokens were chosen before, rows
of the batch that they belong to) -> logits (B, V) and the loops of each row."""


def decode_greedily(forward: Forward, state: KVCache, first: int, max_new_tokens: int, end: int) -> list[Hypothesis]:
    """Take the most probable token until the end mark, for every row of a state.

    Args:
        first: the token that comes before the text.
    """
    chosen: list[list[int]] = [[] for _ in range(len(state.valid))]
    loops_of: list[list[int]] = [[] for _ in chosen]
    rows, going = list(range(len(chosen))), set(range(len(chosen)))
    tokens = [first] * len(rows)
    for step in range(max_new_tokens):
        if 2 * len(going) <= len(rows):  # dropping rows copies the caches, so not for every one that ends
            places = [i for i, row in enumerate(rows) if row in going]
            rows, tokens = [rows[i] for i in places], [tokens[i] for i in places]
            state = state.select(torch.tensor(places, device=state.valid.device))
        logits_BV, loops = forward(state, tokens, step, rows)
        tokens = logits_BV.argmax(-1).tolist()
        for row, token, count in zip(rows, tokens, loops, strict=True):
            if row in going:
                loops_of[row].append(count)
            if row in going and token != end:
                chosen[row].append(token)
            else:
                going.discard(row)
        if not going:
            break
    rows_of = enumerate(zip(chosen, loops_of, strict=True))
    return [Hypothesis(tuple(tokens), tuple(loops), ended=row not in going) for row, (tokens, loops) in rows_of]


class Extension(NamedTuple):
    """A pass that a search asks for: one token for each row of a state. step: tokens chosen before."""

    state: KVCache
    tokens: list[int]
    step: int


class Extended(NamedTuple):
    """The state after an `Extension`, with logits (B, V) and the loops of each row."""

    state: KVCache
    logits: Tensor
    loops: Sequence[int]


Search = Generator[Extension, Extended, list[Hypothesis]]


def search_beams(state: KVCache, first: int, beams: int, max_new_tokens: int, end: int, results: int = 1) -> Search:
    """Search the most probable texts after a state of one row; yield the passes needed, return the best texts.

    The beam holds the `beams` best hypotheses, ended ones among them: a score only falls as a text goes on, so one that
    has ended and is best stays so. With one beam this is greedy decoding.

    Args:
        state: forks of it must be cheap: a `SharedPrefixCache`, whose prefix is kept and read once for all beams.
        first: the token that comes before the text.
        results: return this many hypotheses, best first; the search stops when these have ended.
    """
    beam, tokens = [Hypothesis()], [first]
    for step in range(max_new_tokens):
        state, logits_BV, loops = yield Extension(state, tokens, step)
        ended = [(hypothesis, -1) for hypothesis in beam if hypothesis.ended]
        running = [hypothesis for hypothesis in beam if not hypothesis.ended]
        candidates = ended + _extensions(running, logits_BV, loops, min(beams, logits_BV.shape[-1]), end)
        # Stable: among equals, those that ended earlier and more probable prefixes stay first.
        candidates = sorted(candidates, key=lambda candidate: -candidate[0].log_probability)[:beams]
        beam = [hypothesis for hypothesis, _ in candidates]
        if all(hypothesis.ended for hypothesis in beam[:results]):
            break
        parents = [parent for hypothesis, parent in candidates if not hypothesis.ended]
        tokens = [hypothesis.tokens[-1] for hypothesis in beam if not hypothesis.ended]
        if parents != list(range(len(state.valid))):
            state = state.select(torch.tensor(parents, device=state.valid.device))
    return beam[:results]


def _extensions(
    running: Sequence[Hypothesis], logits_BV: Tensor, loops: Sequence[int], count: int, end: int
) -> list[tuple[Hypothesis, int]]:
    """Each hypothesis with each of its `count` most probable tokens, and its row."""
    # Of the logits themselves: their log-softmax may round two of them to equals, and then argmax would differ.
    values_BK, tokens_BK = logits_BV.float().topk(count)
    scores_BK = values_BK.double() - logits_BV.double().logsumexp(-1, keepdim=True)
    found = []
    for row, (hypothesis, tokens, scores) in enumerate(
        zip(running, tokens_BK.tolist(), scores_BK.tolist(), strict=True)
    ):
        deeper = replace(hypothesis, loops=(*hypothesis.loops, loops[row]))
        for token, score in zip(tokens, scores, strict=True):
            total = hypothesis.log_probability + score
            if token == end:
                found.append((replace(deeper, log_probability=total, ended=True), row))
            else:
                found.append((replace(deeper, log_probability=total, tokens=(*hypothesis.tokens, token)), row))
    return found


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
    """Take passes together, by row. All are of one step."""
    tokens = [token for each in passes.values() for token in each.tokens]
    rows = [row for row, each in passes.items() for _ in each.tokens]
    step = next(iter(passes.values())).step
    logits_BV, loops = forward(RaggedBatch([each.state for each in passes.values()]), tokens, step, rows)
    taken, answers = 0, {}
    for row, each in passes.items():
        part = slice(taken, taken := taken + len(each.tokens))
        answers[row] = Extended(each.state, logits_BV[part], loops[part])
    return answers
