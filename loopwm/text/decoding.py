"""Decoding: the most probable token at a time, and the likelier of that text and one other.

Greedy decoding misses probable texts that begin with an improbable token: where an unseen drawer may hold many things,
each list is less probable than "nothing", though some thing is more probable than that. So the text that takes the
second choice at the first place where it may be more probable as a whole is decoded too, and the likelier is returned:
a step of best-first beam search (Meister et al., 2020). A later place leads from list to list.

A text recalled from recorded episodes (`loopwm.text.memory`) competes with it.

Shape suffixes: B rows, L new columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import inf, log
from typing import NamedTuple

from torch import Tensor, int64

from loopwm.core.kv_cache import KVCache
from loopwm.text.drafts import MOST_DRAFTED, Lookup

UNLIKELY = 0.02
"""Probability below which a second choice is not followed, so that the text before the first other one is final."""

DOUBTFUL = 0.3
"""Probability of the decoded text below which a recalled one is taken."""


class MemoryText(NamedTuple):
    """Tokens of a recalled text, and the log-probability of the decoded one below which it is taken."""

    ids: tuple[int, ...]
    below: float

    def replaces(self, text: float, score: float) -> bool:
        """Return True if it is to be taken. text, score: log-probabilities of the decoded text and its own."""
        return text < self.below or text < score


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
    """Chosen tokens without the end mark.

    loops, scores, seconds: of each token and of the mark, its loops, its log-probability, and the second most probable
    token with its own. ended: the end mark was chosen.
    """

    tokens: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    seconds: tuple[tuple[int, float], ...] = ()
    ended: bool = False

    @property
    def log_probability(self) -> float:
        return sum(self.scores)


Forward = Callable[[Sequence[KVCache], Sequence[Sequence[int]], int, Sequence[int]], tuple[Tensor, Sequence[int]]]
"""Appends tokens to states of one row each, in place, padded at the end.

(states, tokens, number of passes before, rows of the batch) -> logits (B, L, V) and the loops of each row.
"""


@dataclass(frozen=True)
class Decoder:
    """Decoding from one token on.

    forward: appends tokens to states. first: the token that comes before a text. end: id of the end mark.
    max_new_tokens: of a text. drafts: drafted tokens are verified in one pass; needs loops that are the same for all.
    """

    forward: Forward
    first: int
    end: int
    max_new_tokens: int
    drafts: bool

    def likelier(
        self, fresh: Callable[[int], KVCache], lookups: Sequence[Lookup], memory_texts: Sequence[MemoryText | None] = ()
    ) -> list[Hypothesis]:
        """Decode greedily, then the text that departs where another may be likelier; return the likelier ones.

        fresh: returns the state of a row before its text. lookups: as in `greedy`. memory_texts: of each row.
        """
        texts = self.greedy([fresh(row) for row in range(len(lookups))], [copy(lookup) for lookup in lookups])
        departures = ((row, departure(text.scores, text.seconds, text.ended)) for row, text in enumerate(texts))
        places = {row: place for row, place in departures if place is not None}
        starts = [self._depart(texts[row], place) for row, place in places.items()]
        others = self.greedy([fresh(row) for row in places], [copy(lookups[row]) for row in places], starts)
        for row, other in zip(places, others, strict=True):
            if other.ended and not (texts[row].ended and texts[row].log_probability >= other.log_probability):
                texts[row] = other
        self._compare(fresh, texts, memory_texts)
        for lookup, text in zip(lookups, texts, strict=True):
            lookup.extend([*text.tokens, self.end] if text.ended else text.tokens)
        return texts

    def _compare(
        self, fresh: Callable[[int], KVCache], texts: list[Hypothesis], memory_texts: Sequence[MemoryText | None]
    ) -> None:
        """Replace the doubtful texts of rows by what was recalled for them."""
        others = {row: other for row, other in enumerate(memory_texts) if other and other.ids != texts[row].tokens}
        others = {row: other for row, other in others.items() if len(other.ids) <= self.max_new_tokens}
        if not others:
            return
        inputs = [[self.first, *other.ids] for other in others.values()]
        logits_BLV, loops = self.forward([fresh(row) for row in others], inputs, 0, list(others))
        for (row, other), logits_LV, count in zip(others.items(), logits_BLV, loops, strict=True):
            targets = logits_LV.new_tensor([*other.ids, self.end], dtype=int64)
            scores = logits_LV[: len(targets)].float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
            if not texts[row].ended or other.replaces(texts[row].log_probability, sum(scores)):
                texts[row] = Hypothesis(other.ids, (count,) * len(scores), tuple(scores), ended=True)

    def _depart(self, text: Hypothesis, place: int) -> Hypothesis:
        """Return the beginning of a text with the second choice at a place."""
        token, score = text.seconds[place]
        ended = token == self.end
        tokens = text.tokens[:place] if ended else (*text.tokens[:place], token)
        scores = (*text.scores[:place], score)
        return Hypothesis(tokens, text.loops[: place + 1], scores, text.seconds[: place + 1], ended)

    def greedy(
        self, states: Sequence[KVCache], lookups: Sequence[Lookup], starts: Sequence[Hypothesis] = ()
    ) -> list[Hypothesis]:
        """Take the most probable token until the end mark, in fewer passes where the lookups' drafts are right.

        Args:
            states: before each text, of one row each.
            lookups: of each row, up to the token `first`; the chosen tokens are added.
            starts: beginnings of the texts; empty ones by default.
        """
        states, results = list(states), list(starts) or [Hypothesis() for _ in states]
        for lookup, result in zip(lookups, results, strict=True):
            lookup.extend(result.tokens)
        known = [[self.first, *result.tokens] for result in results]
        going = [row for row, result in enumerate(results) if not self._is_over(result)]
        passes = 0
        while going:
            room = MOST_DRAFTED // len(going) if self.drafts else 0
            rooms = {row: min(room, self.max_new_tokens - len(results[row].tokens) - 1) for row in going}
            drafts = [[*takewhile(self.end.__ne__, lookups[row].draft(rooms[row]))] for row in going]
            inputs = [known[row] + draft for row, draft in zip(going, drafts, strict=True)]
            logits_BLV, loops = self.forward([states[row] for row in going], inputs, passes, going)
            choices = zip(_two_best(logits_BLV), loops, drafts, strict=True)
            for row, (best, count, draft) in zip(list(going), choices, strict=True):
                before = len(known[row]) - 1
                # Choices count after a right draft, and the one that corrects it.
                wrong = (place for place, token in enumerate(draft, before) if token != best[place][0][0])
                end = next(wrong, before + len(draft)) + 1
                results[row] = self._extended(results[row], best[before:end], count)
                tokens = [token for (token, _), _ in best[before:end]]
                lookups[row].extend(tokens)
                known[row] = tokens[-1:]
                states[row] = states[row].keep_newest([end], logits_BLV.shape[1])
                if self._is_over(results[row]):
                    lookups[row].share(len(results[row].loops))
                    going.remove(row)
            passes += 1
        return results

    def _is_over(self, text: Hypothesis) -> bool:
        return text.ended or len(text.tokens) >= self.max_new_tokens

    def _extended(self, text: Hypothesis, best: Sequence[TwoBest], loops: int) -> Hypothesis:
        tokens = tuple(token for (token, _), _ in best)
        ended = tokens[-1] == self.end
        return Hypothesis(
            text.tokens + (tokens[:-1] if ended else tokens),
            (*text.loops, *[loops] * len(best)),
            (*text.scores, *[score for (_, score), _ in best]),
            (*text.seconds, *[second for _, second in best]),
            ended,
        )


TwoBest = tuple[tuple[int, float], tuple[int, float]]
"""Most probable token and the second most probable one, each with its log-probability."""


def _two_best(logits_BLV: Tensor) -> list[list[TwoBest]]:
    """Return the two best tokens of each row and column; of equals the first is best, as for argmax."""
    logits = logits_BLV.float()
    ids = logits.argmax(-1, keepdim=True)
    totals = logits.logsumexp(-1, keepdim=True)
    others = logits.scatter(-1, ids, -inf).max(-1, keepdim=True)
    tokens = zip(ids.squeeze(-1).tolist(), others.indices.squeeze(-1).tolist(), strict=True)
    scores = ((values - totals).squeeze(-1).tolist() for values in (logits.gather(-1, ids), others.values))
    return [
        [((one, score), (other, second)) for one, other, score, second in zip(*row, *values, strict=True)]
        for row, values in zip(tokens, zip(*scores, strict=True), strict=True)
    ]


def departure(scores: Sequence[float], seconds: Sequence[tuple[int, float]], ended: bool) -> int | None:
    """Return the first place where the second choice may begin a text more probable than this one; None if none may.

    Args:
        scores: log-probabilities of the text's tokens, with its end mark.
        seconds: the second most probable token at each of them, and its log-probability.
        ended: False for a text that was cut, which any whole text beats.
    """
    *before, total = accumulate(scores, initial=0.0)
    least = total if ended else -inf
    others = enumerate(zip(before, seconds, strict=True))
    return next((i for i, (start, (_, score)) in others if score >= log(UNLIKELY) and start + score > least), None)
