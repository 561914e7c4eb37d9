"""Decoding against searches written out without caches."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from loopwm.core.exit_rules import Convergence, Fixed
from loopwm.records import template
from loopwm.text.decoding import UNLIKELY, Decoder, departure
from loopwm.text.drafts import Lookup, SharedText, as_text
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model
from tests.text.test_world import ACTIONS, LONG, SHORT

DEPTH, LENGTH = 3, 6
END = 0
"""Id of the end mark of toy models."""


@pytest.fixture(scope="module")
def ending(model, tokenizer) -> WorldModel:
    """A world model whose end mark is a word that its random weights choose as the third."""
    world_model = WorldModel(model, tokenizer)
    world = world_model.advance(world_model.encode([SHORT], DEPTH), ["wait"])
    ids = world_model._ids(world_model.decode(world, 3, greedy=True)[0])
    world_model._end = ids[-1]
    return world_model


def imagined(world_model: WorldModel, rows=(0, 1)):
    world = world_model.encode([(SHORT, LONG)[row] for row in rows], DEPTH)
    return world_model.advance(world, [ACTIONS[row][0] for row in rows])


def uncached_greedy(world_model: WorldModel, prompt: str, begun: list[int]) -> tuple[list[int], list[list[float]]]:
    """The greedy text after a beginning, with its end mark, and the log-probabilities at each of its tokens."""
    start, tokens, scores = world_model._ids(prompt), list(begun), []
    while tokens[-1:] != [world_model._end] and len(tokens) < LENGTH:
        with torch.no_grad():
            logits = world_model.model(torch.tensor([start + tokens]), depth=DEPTH).logits[0, -1]
        scores.append(logits.double().log_softmax(-1).tolist())
        tokens.append(int(logits.argmax()))
    return tokens, scores


def uncached_likelier(world_model: WorldModel, prompt: str) -> tuple[list[int], float, bool]:
    """The likelier text with its end mark, its log-probability, and whether it is not the greedy one."""
    tokens, scores = uncached_greedy(world_model, prompt, [])
    chosen = [row[token] for row, token in zip(scores, tokens, strict=True)]
    bounds = [sum(chosen[:place]) + sorted(row)[-2] for place, row in enumerate(scores)]
    total = sum(chosen) if tokens[-1] == world_model._end else -math.inf
    place = next((place for place, bound in enumerate(bounds) if bound > total), None)
    if place is None:
        return tokens, sum(chosen), False
    other = [*tokens[:place], scores[place].index(sorted(scores[place])[-2])]
    others, more = uncached_greedy(world_model, prompt, other)
    total = bounds[place] + sum(row[token] for row, token in zip(more, others[place + 1 :], strict=True))
    end = world_model._end
    if others[-1] == end and (tokens[-1] != end or total > sum(chosen)):
        return others, total, True
    return tokens, sum(chosen), False


def test_decoding_equals_a_search_without_caches(ending, monkeypatch):
    monkeypatch.setattr("loopwm.text.decoding.UNLIKELY", 1e-9)  # random weights are sure of nothing
    prompts = [
        template.render_prompt(context, actions[:1], ending.slots)
        for context, actions in zip((SHORT, LONG), ACTIONS, strict=True)
    ]
    departed = {True: 0, False: 0}
    texts = [uncached_greedy(ending, prompt, []) for prompt in prompts]
    seconds = {row.index(sorted(row)[-2]) for _, rows in texts for row in rows}
    for end in seconds.union(*(tokens for tokens, _ in texts)):
        monkeypatch.setattr(ending, "_end", end)
        for prompt, decoded in zip(prompts, ending.decode_traced(imagined(ending), LENGTH), strict=True):
            tokens, score, is_other = uncached_likelier(ending, prompt)
            ended = tokens[-1] == end
            assert decoded.text == ending.tokenizer.decode(tokens[: len(tokens) - ended], skip_special_tokens=True)
            assert decoded.ended == ended
            assert decoded.loops == (DEPTH,) * len(tokens)
            assert decoded.log_probability == pytest.approx(score, abs=1e-3)
            departed[is_other] += 1
    assert all(departed.values()), departed


@pytest.mark.parametrize("sees", ["all", "state"])
def test_texts_of_a_batch_equal_those_alone(tokenizer, sees, monkeypatch):
    """Also of copies that share a prefix, and where the decoder reads the slots only; the worlds stay as they are."""
    monkeypatch.setattr("loopwm.text.decoding.UNLIKELY", 1e-9)
    world_model = WorldModel(random_model(decode_sees=sees), tokenizer)
    together = imagined(world_model)
    texts = world_model.decode(together, 12)
    assert texts == [world_model.decode(imagined(world_model, [row]), 12)[0] for row in (0, 1)]
    copies = world_model.advance(world_model.encode([LONG], DEPTH).select([0, 0]), ["wait", ACTIONS[1][0]])
    assert world_model.decode(copies, 12)[1] == texts[1]
    assert world_model.decode(together, 12) == texts


def test_where_exits_depend_on_tokens_decoding_is_greedy(ending, monkeypatch):
    monkeypatch.setattr("loopwm.text.decoding.UNLIKELY", 1e-9)
    world = imagined(ending)
    prompt = template.render_prompt(LONG, ACTIONS[1][:1], ending.slots)
    (_, (first, *_)) = uncached_greedy(ending, prompt, [])
    monkeypatch.setattr(ending, "_end", first.index(sorted(first)[-2]))  # the end mark is a second choice
    rule = Convergence(0.5, DEPTH)
    assert ending.decode_traced(world, 20, rule) == ending.decode_traced(world, 20, rule, greedy=True)
    assert ending.decode(world, 20, Fixed(DEPTH)) != ending.decode(world, 20, Fixed(DEPTH), greedy=True)


class Toy:
    """Language model of a few words that gives each text before the next word its probabilities."""

    def __init__(self, probabilities: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.probabilities, self.passes = probabilities, 0

    def decode(self, lookup: Lookup | None = None, max_new_tokens: int = 9, greedy: bool = False):
        decoder = self.decoder(max_new_tokens)
        lookups = [lookup or Lookup(SharedText(), "")]
        if greedy:
            return decoder.greedy([Rows(()) for _ in lookups], lookups)
        return decoder.likelier(self.fresh, lookups)

    def decoder(self, max_new_tokens: int = 9) -> Decoder:
        return Decoder(self._forward, 9, END, max_new_tokens, drafts=True)

    @staticmethod
    def fresh(row: int) -> Rows:
        return Rows(())

    def _forward(self, states, tokens, step, rows):
        self.passes += 1
        length = max(map(len, tokens))
        logits = torch.full((len(states), length, 10), -math.inf)
        for row, (state, new) in enumerate(zip(states, tokens, strict=True)):
            for column, token in enumerate(new):
                state.tokens = (*state.tokens, token)
                for word, probability in self.probabilities.get(state.tokens[1:], {END: 1.0}).items():
                    logits[row, column, word] = math.log(probability)
        return logits, [1] * len(states)


class Rows:
    """State of a toy model: its tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def keep_newest(self, counts: list[int], columns: int) -> Rows:
        (count,) = counts
        return Rows(self.tokens[: len(self.tokens) - columns + count])


EMPTY_OR_FULL = {
    (): {1: 0.7, 2: 0.3},  # something or nothing
    (1,): {3: 0.4, 4: 0.35, 5: 0.25},
}


def test_a_probable_text_with_an_improbable_beginning_is_found():
    (found,) = Toy(EMPTY_OR_FULL).decode()
    assert found.tokens == (2,)
    assert found.log_probability == pytest.approx(math.log(0.3))
    assert found.ended
    (greedy,) = Toy(EMPTY_OR_FULL).decode(greedy=True)
    assert greedy.tokens == (1, 3)
    assert greedy.log_probability == pytest.approx(math.log(0.28))


def test_a_text_that_is_likely_enough_costs_no_second_one():
    sure = Toy({(): {1: 0.9, 2: 0.1}, (1,): {3: 0.8, 4: 0.2}})
    (found,) = sure.decode()
    assert found.tokens == (1, 3)
    assert sure.passes == 3


def test_the_other_text_is_dropped_where_it_turns_out_less_likely():
    (found,) = Toy({**EMPTY_OR_FULL, (2,): {6: 0.5, 7: 0.5}}).decode()
    assert found.tokens == (1, 3)


def test_lookup_after_two_texts_has_the_returned_one_only():
    lookup = Lookup(SharedText(), as_text([5, 6, 7, 8]))
    (found,) = Toy(EMPTY_OR_FULL).decode(lookup)
    assert found.tokens == (2,)
    lookup.extend([5, 6, 7, 8])
    assert lookup.draft(9) == [2, END, 5, 6, 7, 8]


def test_an_end_is_a_second_choice_too_and_beats_a_text_that_is_cut():
    endless = {(1,) * n: {1: 0.9, END: 0.1} for n in range(20)}
    (found,) = Toy(endless).decode(max_new_tokens=12)
    assert (found.tokens, found.ended) == ((), True)
    (cut,) = Toy(endless).decode(max_new_tokens=12, greedy=True)
    assert (cut.tokens, cut.ended) == ((1,) * 12, False)


def test_the_departure_is_the_first_of_those_that_are_likely():
    log = math.log
    scores = [log(0.6), log(0.5), log(0.5)]
    assert departure(scores, [(1, log(0.2)), (2, log(0.45)), (3, log(0.3))], ended=True) == 0  # 0.2, 0.27, 0.09
    assert departure(scores, [(1, log(0.1)), (2, log(0.45)), (3, log(0.3))], ended=True) == 1
    assert departure(scores, [(1, log(0.1)), (2, log(0.2)), (3, log(0.3))], ended=True) is None  # less than 0.15
    assert departure(scores, [(1, log(0.1)), (2, log(0.2)), (3, log(0.3))], ended=False) == 0
    rare = log(UNLIKELY * 0.99)
    assert departure([log(0.9), log(0.01)], [(1, rare), (2, log(UNLIKELY))], ended=True) == 1
    assert departure([log(0.9), log(0.01)], [(1, rare), (2, rare)], ended=True) is None


def test_greedy_row_stays_as_it_ended_while_others_go_on():
    texts = ([5, 0], [7, 7, 7, 7, 0], [8, 8, 8, 0])

    def forward(states, tokens, step, rows):
        logits = torch.full((len(rows), 1, 10), -50.0)
        for place, row in enumerate(rows):
            logits[place, 0, texts[row][step]] = 50.0
        return logits, [step + row for row in rows]

    decoder = Decoder(forward, 1, END, max_new_tokens=5, drafts=False)
    decoded = decoder.greedy([Rows((0,)) for _ in texts], [Lookup(SharedText(), "") for _ in texts])
    assert [row.tokens for row in decoded] == [(5,), (7, 7, 7, 7), (8, 8, 8)]
    assert [row.loops for row in decoded] == [(0, 1), (1, 2, 3, 4, 5), (2, 3, 4, 5)]
    assert all(row.ended for row in decoded)


def test_a_beginning_is_read_in_one_pass(ending):
    """And what follows it is what follows it in a text that was decoded from the start."""
    world = imagined(ending, [1])
    decoder = Decoder(partial(ending._next_tokens, Fixed(DEPTH)), ending._obs, -1, LENGTH, drafts=False)
    fresh = partial(ending.before_decoding, world)
    with torch.inference_mode():
        (whole,) = decoder.greedy([fresh()], [Lookup(SharedText(), "")])
        place = 3
        cut = type(whole)(whole.tokens[:place], whole.loops[:place], whole.scores[:place], whole.seconds[:place])
        (again,) = decoder.greedy([fresh()], [Lookup(SharedText(), "")], [cut])
    assert again.tokens == whole.tokens
    assert again.scores == pytest.approx(whole.scores, abs=1e-4)


def test_decoding_of_no_token_is_refused(world_model):
    with pytest.raises(ValueError, match="max_new_tokens: must be at least 1, got 0"):
        world_model.decode(imagined(world_model), 0)


def test_samples_are_distributed_as_the_uncached_models_probabilities(model, tokenizer):
    """The ten most probable first tokens, and the rest, in 1,000 draws: Pearson's statistic of 10 degrees."""
    world_model, draws = WorldModel(model, tokenizer), 1000
    world = imagined(world_model, [0])
    prompt = template.render_context(SHORT, world_model.slots)
    prompt += template.render_step(ACTIONS[0][0], world_model.slots) + template.OBS
    _, (scores, *_) = uncached_greedy(world_model, prompt, [])
    shares = torch.tensor(scores).exp()
    best = shares.topk(10)
    generator = torch.Generator().manual_seed(0)
    texts = world_model.sample_each([world] * draws, generator, max_new_tokens=1)
    counts = [texts.count(tokenizer.decode([token], skip_special_tokens=True)) for token in best.indices.tolist()]
    observed = torch.tensor([*counts, draws - sum(counts)], dtype=torch.float64)
    expected = draws * torch.cat([best.values, 1 - best.values.sum()[None]])
    assert ((observed - expected) ** 2 / expected).sum() < 29.6  # exceeded once in a thousand seeds
