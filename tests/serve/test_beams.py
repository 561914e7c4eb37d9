"""Beam search in the engine and over HTTP, as vLLM's clients ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from loopwm.core import KVCache
from loopwm.records import template
from loopwm.records.template import Context
from loopwm.text.world import WorldModel
from serve.engine.beams import search
from serve.engine.engine import Engine
from serve.engine.forward import ModelRunner
from serve.engine.requests import Finish, Request
from serve.engine.sampling import SamplingParams
from tests.fixtures.engine import DEPTH, NEVER, Collector, fail, random_prompt, run
from tests.serve.http.test_generation import CHAT, COMPLETIONS, choices_of
from tests.serve.http.test_http import check_error, completion, events

PROMPTS = (random_prompt(1, 1), random_prompt(20, 2), random_prompt(33, 3))


def request(prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens, beam_search=True), DEPTH)


def submitted(engine: Engine, asked: Request, beams: int) -> list[Collector]:
    collectors = [Collector(asked) for _ in range(beams)]
    engine.submit([collector.request for collector in collectors])
    return collectors


def searched_alone(model: Any, asked: Request, beams: int, end_token: int = NEVER) -> list[tuple[int, ...]]:
    """Texts, best first, of a search whose prompt runs in one pass and shares nothing."""
    forward = ModelRunner(model)
    state = KVCache(1, forward.device)
    if asked.prompt[:-1]:
        forward.run(state, [asked.prompt[:-1]], DEPTH)
    return [one.tokens for one in run(search(forward, state, asked, beams, end_token))]


def test_searches_beside_others_equal_those_alone(tiny_model, requests):
    asked = [request(prompt, 9 + i) for i, prompt in enumerate(PROMPTS)]
    alone = [searched_alone(tiny_model, one, 2 + i) for i, one in enumerate(asked)]
    with Engine(tiny_model, NEVER) as engine:
        greedy = Collector(requests[0])
        engine.submit([greedy.request])
        searches = [submitted(engine, one, 2 + i) for i, one in enumerate(asked)]
        collectors = [one for texts in searches for one in texts]
        assert all(one.over.wait(30) for one in (greedy, *collectors))
    assert [[tuple(one.tokens) for one in texts] for texts in searches] == alone
    assert all(one.last.finish == Finish.LENGTH and one.loops == [2] * len(one.tokens) for one in collectors)


def test_ends_of_beams_are_emitted_with_their_loops(tiny_model):
    asked = request(PROMPTS[1], 5)
    end_token = searched_alone(tiny_model, asked, 3)[0][2]
    texts = searched_alone(tiny_model, asked, 3, end_token)
    with Engine(tiny_model, end_token) as engine:
        collectors = submitted(engine, asked, 3)
        assert all(one.over.wait(30) for one in collectors)
    assert [tuple(one.tokens) for one in collectors] == texts
    ended = [one for one in collectors if one.last.finish == Finish.STOP]
    assert ended
    assert all(one.last.loops == 2 and len(one.tokens) < 5 for one in ended)


def test_a_failing_search_is_reported_to_all_choices(tiny_model, monkeypatch):
    with Engine(tiny_model, NEVER) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny_model.model), "forward", fail)
            collectors = submitted(engine, request(PROMPTS[1], 5), 2)
            assert all(one.over.wait(30) for one in collectors)
        assert all(isinstance(one.last.error, MemoryError) for one in collectors)
        assert submitted(engine, request(PROMPTS[1], 5), 1)[0].over.wait(30)


def test_choices_of_a_search_begin_with_the_worlds_text(client, tiny_model, tokenizer, chat):
    world_model = WorldModel(tiny_model, tokenizer)
    context = Context("boil water", "a kitchen")
    prompt = template.render_prompt(context, ["open cupboard"], world_model.slots)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "n": 4, "use_beam_search": True}
    texts = [choice["text"] for choice in choices_of(client, COMPLETIONS, body)]
    world = world_model.advance(world_model.encode([context]), ["open cupboard"])
    world_model._end = NEVER
    assert texts[0] == world_model.decode(world, 8, beams=4)[0]
    assert len(set(texts)) == 4
    streamed = [""] * 4
    for event in events(client, COMPLETIONS, body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    one, greedy = (choices_of(client, CHAT, {**chat, **more})[0] for more in ({"use_beam_search": True}, {}))
    assert one == greedy


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 0.5}, "temperature", ["must be 0 with use_beam_search", "0.5"]),
        ({"logprobs": 1}, "logprobs", ["use_beam_search"]),
        ({"stop": ["e"]}, "stop", ["use_beam_search"]),
        ({"min_tokens": 2}, "min_tokens", ["use_beam_search"]),
        ({"ignore_eos": True}, "ignore_eos", ["use_beam_search"]),
        ({"echo": True, "logprobs": 1, "max_tokens": 1, "n": 1}, "use_beam_search", ["echo and logprobs"]),
        ({"length_penalty": 1.0}, "length_penalty", ["0"]),
        ({"n": 65}, "n", ["64"]),
    ],
)
def test_a_search_with_a_field_not_offered_is_refused(client, fields, param, words):
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 4, "n": 2, "use_beam_search": True, **fields}
    check_error(client.post(COMPLETIONS, json=body), 400, param, *words)


def test_a_search_of_temperature_zero_is_taken(client):
    found = completion(client, max_tokens=3, n=2, use_beam_search=True, temperature=0, length_penalty=0)
    assert found["usage"]["completion_tokens"] == 6
