"""Decoding: greedy for a padded batch, or beam search over forks of each row's keys and values.

The score of a hypothesis is the sum of the log-probabilities of its tokens, the end mark included. That is
`length_penalty: 0` of vLLM and transformers, so the search returns the most probable text. vLLM's default of 1 divides
by the number of tokens of prompt and text together.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from loopwm.core import KVCache, RaggedBatch
from loopwm.text.drafts import MOST_DRAFTED, Lookup
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


Verify = Callable[[Sequence[KVCache], Sequence[Sequence[int]]], tuple[Tensor, int]]
"""Appends tokens to states of one row each, in place, padded at the end: -> logits (B, L, V) and loops of all."""

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


def decode_drafts(
    verify: Verify, states: Sequence[KVCache], lookups: Sequence[Lookup], first: int, max_new_tokens: int, end: int
) -> list[Hypothesis]:
    """Decode as `decode_greedily`, in fewer passes where the lookups' drafts are right.

    Args:
        verify: appends tokens to the states.
        states: of one row each.
        lookups: of each row, up to the token `first`; the chosen tokens are added.
        first: the token that comes before the text.
        max_new_tokens: of each text.
        end: id of the end mark.
    """
    states, results = list(states), [Hypothesis() for _ in states]
    newest, going = [first] * len(states), list(range(len(states)))
    while going:
        room = MOST_DRAFTED // len(going)
        rooms = {i: min(room, max_new_tokens - len(results[i].tokens) - 1) for i in going}
        inputs = [[newest[i], *takewhile(end.__ne__, lookups[i].draft(rooms[i]))] for i in going]
        logits_BLV, loops = verify([states[i] for i in going], inputs)
        values_BL, tokens_BL = logits_BLV.float().max(-1)
        scores_BL = values_BL - logits_BLV.float().logsumexp(-1)
        choices = zip(tokens_BL.tolist(), scores_BL.tolist(), strict=True)
        for i, given, (chosen, scores) in zip(list(going), inputs, choices, strict=True):
            count = _right(given[1:], chosen)
            tokens = tuple(chosen[:count])
            ended = tokens[-1] == end
            results[i] = Hypothesis(
                results[i].tokens + (tokens[:-1] if ended else tokens),
                (*results[i].loops, *[loops] * count),
                results[i].log_probability + sum(scores[:count]),
                ended,
            )
            lookups[i].extend(tokens)
            newest[i] = tokens[-1]
            states[i] = states[i].keep_newest([count], logits_BLV.shape[1])
            if ended or len(results[i].tokens) == max_new_tokens:
                lookups[i].share(len(results[i].loops))
                going.remove(i)
    return results


def _right(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many of the chosen tokens count: those after a right draft, and the one that corrects it."""
    wrong = (place for place, token in enumerate(draft) if token != chosen[place])
    return next(wrong, len(draft)) + 1


def search_beams(
    forward: Forward, states: Sequence[KVCache], first: int, beams: int, max_new_tokens: int, end: int
) -> list[list[Hypothesis]]:
    """Search the most probable texts after each state of one row; return its `beams` hypotheses, best first.

    Ended hypotheses stay in the beam: a score only falls as a text goes on, so one that has ended and is best stays so,
    and ends its search. With one beam this is greedy decoding.

    Args:
        forward: appends tokens to the states.
        states: forks of them must be cheap: caches with a prefix, which is kept and read once for all beams.
        first: the token that comes before the text.
        beams: hypotheses that are kept.
        max_new_tokens: of each text.
        end: id of the end mark.
    """
    states, hypotheses = list(states), [[Hypothesis()] for _ in states]
    for step in range(max_new_tokens):
        rows = [row for row, beam in enumerate(hypotheses) if not beam[0].ended]
        if not rows:
            break
        running = [[hypothesis for hypothesis in hypotheses[row] if not hypothesis.ended] for row in rows]
        tokens = [hypothesis.tokens[-1] if step else first for each in running for hypothesis in each]
        row_of = [row for row, each in zip(rows, running, strict=True) for _ in each]
        logits_BV, loops = forward(RaggedBatch([states[row] for row in rows]), tokens, step, row_of)
        after = 0
        for row, each in zip(rows, running, strict=True):
            part = slice(after, after := after + len(each))
            ended = [(hypothesis, -1) for hypothesis in hypotheses[row] if hypothesis.ended]  # no row in the state
            candidates = ended + _extensions(each, logits_BV[part], loops[part], min(beams, logits_BV.shape[-1]), end)
            # Stable: among equals, those that ended earlier and more probable prefixes stay first.
            candidates = sorted(candidates, key=lambda candidate: -candidate[0].log_probability)[:beams]
            hypotheses[row] = [hypothesis for hypothesis, _ in candidates]
            parents = [parent for hypothesis, parent in candidates if not hypothesis.ended]
            if parents and parents != list(range(len(each))):  # the same rows in order need no copy
                states[row] = states[row].select(torch.tensor(parents, device=logits_BV.device))
    return hypotheses


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
