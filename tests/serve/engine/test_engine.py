"""Token ids: a request's tokens are its own, whatever else is in the batch."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopwm.core.exit_rules import Fixed
from loopwm.core.kv_cache import KVCache, allocated_bytes
from loopwm.text.drafts import as_text
from serve.engine.batch import RunningBatch
from serve.engine.engine import Engine
from serve.engine.forward import ModelRunner, prefill, score
from serve.engine.prefix_cache import BLOCK, PrefixCache
from serve.engine.requests import Finish, Request, WorkItem
from serve.engine.sampling import SamplingParams
from serve.limits import Limits
from tests.fixtures.engine import DEPTH, NEVER, Collector, Model, alone, counted, fail, random_prompt, run
from tests.fixtures.service import wait_until


def test_tokens_are_those_of_the_model_without_any_cache(tiny_model, requests):
    request = requests[0]
    ids = list(request.prompt)
    for _ in range(request.params.max_tokens):
        ids.append(int(tiny_model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert alone(tiny_model, request).tokens == ids[len(request.prompt) :]


@pytest.mark.parametrize("most", [7, 1 << 20])
def test_tokens_do_not_depend_on_what_else_is_in_the_batch_nor_on_the_pieces_of_the_prompt(tiny_model, requests, most):
    together, made = [Collector(request) for request in requests], Model(tiny_model, most=most)
    made.add(*together[:2])
    made.batch.step()
    made.batch.step()
    made.add(*together[2:])  # late, longer and shorter than what runs
    made.finish()
    for collector, request in zip(together, requests, strict=True):
        assert collector.tokens == alone(tiny_model, request).tokens
        assert len(collector.tokens) == request.params.max_tokens
        assert collector.last.finish == Finish.LENGTH


def test_scores_do_not_depend_on_the_pieces_of_the_prompt(tiny_model):
    prompt = random_prompt(50, 1)
    whole, pieces = (run(score(ModelRunner(tiny_model), prompt, DEPTH, 2), most) for most in (99, 9))
    assert len(whole.chosen) == len(prompt) - 1
    assert pieces.chosen == pytest.approx(whole.chosen, abs=1e-4)
    assert [[token for token, _ in top] for top in pieces.tops] == [[token for token, _ in top] for top in whole.tops]


def test_the_end_token_ends_a_request_and_is_not_delivered(tiny_model, requests):
    free = alone(tiny_model, requests[1]).tokens
    end = next(token for i, token in enumerate(free) if i > 0 and token not in free[:i])
    stopped = alone(tiny_model, requests[1], end_token=end)
    assert stopped.tokens == free[: free.index(end)]
    assert stopped.last.finish == Finish.STOP


def test_a_cancelled_row_leaves_and_the_others_are_untouched(tiny_model, requests):
    one, two, made = Collector(requests[0]), Collector(requests[1]), Model(tiny_model)
    made.add(one, two)
    made.batch.step()
    one.request.cancelled = True
    made.batch.step()
    assert (len(made.batch), len(one.tokens)) == (1, 1)
    made.finish()
    assert two.tokens == alone(tiny_model, requests[1]).tokens


def test_a_row_thatfails_is_alone_with_it(tiny_model, requests, monkeypatch):
    """Whether the pass fails or the choice of its token: the others hear what they hear without it."""
    poison, others = replace(requests[3], prompt=(*requests[3].prompt[:-1], 7)), requests[:3]
    forward = type(tiny_model.model).forward

    def fails_with_poison(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (tokens == 7).any():
            raise MemoryError("no room")
        return forward(self, tokens, *args, **kwargs)

    expected = [alone(tiny_model, request).tokens for request in others]
    monkeypatch.setattr(type(tiny_model.model), "forward", fails_with_poison)
    heard, broken, made = [Collector(request) for request in others], Collector(poison), Model(tiny_model)
    unluckily = Collector(replace(requests[4], params=SamplingParams(temperature=float("nan"), max_tokens=12)))
    made.add(*heard, broken, unluckily)
    made.finish()
    assert isinstance(broken.last.error, MemoryError)
    assert isinstance(unluckily.last.error, RuntimeError)
    assert [collector.tokens for collector in heard] == expected


def test_who_can_neither_run_together_nor_be_copied_apart_hears_it(tiny_model, requests, monkeypatch):
    heard, made = [Collector(request) for request in requests[:3]], Model(tiny_model)
    made.add(*heard)
    monkeypatch.setattr(type(tiny_model.model), "forward", fail)
    monkeypatch.setattr(KVCache, "row", fail)
    made.finish()
    assert all(isinstance(collector.last.error, MemoryError) for collector in heard)


def test_a_row_that_cannot_join_is_alone_with_it(tiny_model, requests, monkeypatch):
    add = RunningBatch.add

    def adds_but_one(self: RunningBatch, row: Request, state: KVCache) -> None:
        return fail() if row.prompt == requests[1].prompt else add(self, row, state)

    monkeypatch.setattr(RunningBatch, "add", adds_but_one)
    heard = [Collector(request) for request in requests[:3]]
    with Engine(tiny_model, NEVER) as engine:
        for collector in heard:
            engine.submit([collector.request])
        assert all(wait_until(collector.over.is_set) for collector in heard)
    assert [isinstance(collector.last.error, MemoryError) for collector in heard] == [False, True, False]


def test_what_has_begun_has_its_memory_before_others_begin(tiny_model, monkeypatch):
    """Two long prompts, each at more loops than usual, of which memory holds one."""
    asked = [Request(random_prompt(300, seed), SamplingParams(max_tokens=2), Fixed(4)) for seed in range(2)]
    token = ModelRunner(tiny_model).token_bytes(4)
    assert token > ModelRunner(tiny_model).token_bytes(2)
    heard, begun = [Collector(request) for request in asked], []
    advance = WorkItem.advance

    def watched(self: WorkItem, result: Any) -> None:
        if self.pending is None:
            begun.append(sum(collector.over.is_set() for collector in heard))
        advance(self, result)

    monkeypatch.setattr(WorkItem, "advance", watched)
    gc.collect()  # garbage of other tests, freed while this one runs, would leave room for both
    with Engine(tiny_model, NEVER, Limits(cache_bytes=allocated_bytes() + 500 * token)) as engine:
        for collector in heard:
            engine.submit([collector.request])
        assert all(wait_until(collector.over.is_set) for collector in heard)
    assert begun == [0, 1]


def test_depth_is_the_number_of_loops(tiny_model, requests):
    for loops in (1, 3):
        request = replace(requests[0], depth=Fixed(loops), params=SamplingParams(max_tokens=1))
        expected = tiny_model(torch.tensor([request.prompt]), depth=loops).logits[0, -1].argmax()
        collector = alone(tiny_model, request)
        assert collector.tokens == [expected]
        assert collector.loops == [loops]


def test_a_prompt_that_begins_like_a_former_one_runs_its_own_part_alone(tiny_model, monkeypatch):
    head = random_prompt(3 * BLOCK + 3, 8)
    asked = [Request(head + random_prompt(5, seed), SamplingParams(max_tokens=3), DEPTH) for seed in range(3)]
    expected = [alone(tiny_model, request).tokens for request in asked]
    made, collectors = Model(tiny_model), [Collector(request) for request in (*asked, asked[0])]
    sizes = counted(tiny_model, monkeypatch)
    made.add(*collectors)
    assert sizes == [len(head) + 4, 4, 4], "the last one is known whole, but for the token that is left to run"
    made.finish()
    assert [c.tokens for c in collectors] == [*expected, expected[0]]


def test_a_row_that_goes_on_leaves_the_cached_prompt(tiny_model):
    cache, prompt = PrefixCache(1 << 40), random_prompt(2 * BLOCK, 1)
    for ids in (prompt, (*prompt, 1)):
        state = run(prefill(ModelRunner(tiny_model), cache, ids, 2))
        state.extend(torch.ones(1, 1, dtype=torch.bool))
        assert cache.get((2, prompt)).length == len(prompt)


def test_choices_of_one_prompt_run_and_keep_it_once(tiny_model, monkeypatch):
    request = Request(random_prompt(200, 8), SamplingParams(1.0, 1.0, 3, max_tokens=4), DEPTH)
    requests = [replace(request, params=SamplingParams(1.0, 1.0, seed, max_tokens=4)) for seed in range(3)]
    expected = [alone(tiny_model, request).tokens for request in requests]
    heard = [Collector(request) for request in requests]
    with Engine(tiny_model, NEVER) as engine:
        sizes = counted(tiny_model, monkeypatch)
        engine.submit([collector.request for collector in heard])
        assert all(wait_until(collector.over.is_set) for collector in heard)
    assert [collector.tokens for collector in heard] == expected
    assert sizes == [199, 3, 3, 3, 3]


@pytest.mark.parametrize("wrong", [None, 4, 0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_change_passes_and_not_tokens(tiny_model, monkeypatch, temperature, wrong):
    prompt = random_prompt(40, 8)
    requests = [
        Request(prompt, SamplingParams(temperature, seed=seed, max_tokens=12, logprobs=0), DEPTH) for seed in range(3)
    ]
    with monkeypatch.context() as patch:
        patch.setattr("serve.engine.batch.MOST_DRAFTED", 0)
        expected = [alone(tiny_model, request) for request in requests]
    known = [list(one.tokens) for one in expected]
    for tokens in known if wrong is not None else ():
        tokens[wrong] ^= 1
    seen = [as_text((*prompt, *tokens)) for tokens in known]
    heard = [Collector(replace(request, context=text)) for request, text in zip(requests, seen, strict=True)]
    passes, forward = [], type(tiny_model.model).forward
    monkeypatch.setattr(type(tiny_model.model), "forward", lambda *a, **k: passes.append(a) or forward(*a, **k))
    with Engine(tiny_model, NEVER) as engine:
        engine.submit([collector.request for collector in heard])
        assert all(wait_until(collector.over.is_set) for collector in heard)
    for one, other in zip(heard, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.loops == other.loops
        assert one.last.scores.chosen == pytest.approx(other.last.scores.chosen, abs=1e-4)
    assert wrong == 0 or len(passes) < 10, "the prompt and 12 tokens took 13"
