"""Rows of a key that fills the memory are preempted for another key, and resume with the same text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopwm.core.exit_rules import ExitRule, Gate
from loopwm.core.kv_cache import SLACK, KVCache, allocated_bytes
from serve.engine.engine import Engine
from serve.engine.forward import ModelRunner
from serve.engine.requests import Request, RequestContext
from serve.engine.sampling import SamplingParams
from serve.engine.scheduler import Scheduler
from serve.limits import Limits
from tests.fixtures.engine import DEPTH, NEVER, Starter, alone, random_prompt
from tests.fixtures.models import random_model
from tests.fixtures.service import wait_until

GREEDY = SamplingParams(max_tokens=60)
LONG, SHORT = 200, 100
"""Tokens of prompts."""
ROWS = LONG + SHORT + 60 + 110
"""Tokens of memory for a row of each, both of 60 tokens more, and not for a third one."""


@pytest.fixture
def preempted(monkeypatch) -> list[Request]:
    """Return the requests that are preempted from now on."""
    requests: list[Request] = []
    preempt = Engine._preempt_for

    def watched(self: Engine, item: Any) -> Request | None:
        row = preempt(self, item)
        requests.extend([] if row is None else [row])
        return row

    monkeypatch.setattr(Engine, "_preempt_for", watched)
    return requests


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    """Return a function that makes an engine with memory for that many tokens beyond what is in use."""

    def make(model: Any, tokens: int) -> Engine:
        gc.collect()  # garbage of other tests, freed while this one runs, would leave more room
        token = ModelRunner(model).token_bytes(DEPTH.loops)
        return Engine(model, NEVER, Limits(cache_bytes=allocated_bytes() + tokens * token))

    return make


def request_of(length: int, params: SamplingParams, depth: ExitRule = DEPTH) -> Request:
    return Request(random_prompt(length, length), params, depth)


def run(engine: Engine, hogs: list[Request], others: list[Request], keys: tuple[str, str] = ("hog", "other")) -> Any:
    """Start the others when all hogs decode; return what all of them heard, and who ended in which order."""
    ends: list[int] = []

    class Row(Starter):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if event.finish or event.error:
                ends.append(rows.index(self))

    def start() -> None:
        began.append(1)
        if len(began) == len(hogs):
            for row in rows[len(hogs) :]:
                engine.submit([row.request])

    began: list[int] = []
    with engine:
        contexts = [engine.admit(key) for key in keys]
        rows = [Row(replace(one, ctx=contexts[0]), start=start) for one in hogs]
        rows += [Row(replace(one, ctx=contexts[1]), start=lambda: None) for one in others]
        for row in rows[: len(hogs)]:
            engine.submit([row.request])
        assert all(wait_until(row.over.is_set) for row in rows)
    return rows, ends


@pytest.mark.parametrize("from_a_world", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 0.9, 3, max_tokens=60, logprobs=2)])
def test_preempted_row_goes_on_with_the_same_text(tiny_model, preempted, engine_of, params, from_a_world):
    long = request_of(LONG, params)
    if from_a_world:
        seen = KVCache(1, torch.device("cpu"))
        ModelRunner(tiny_model).decode(seen, [long.prompt[:50]], DEPTH)
        long = replace(long, prompt=long.prompt[50:], start=seen)
    hogs = [long, request_of(SHORT, GREEDY)]
    other = request_of(SHORT + 1, SamplingParams(max_tokens=5))
    whole = request_of(LONG, params)
    expected = [alone(tiny_model, one) for one in (whole, hogs[1], other)]
    rows, ends = run(engine_of(tiny_model, ROWS), hogs, [other])
    assert [one.prompt for one in preempted] == [long.prompt]
    assert ends[0] == 2, "the other key does not wait for the end of a hog's row"
    assert [row.tokens for row in rows] == [one.tokens for one in expected]
    assert [row.loops for row in rows] == [one.loops for one in expected]


def test_key_that_would_hold_as_much_preempts_nothing(tiny_model, preempted, engine_of):
    hog, other = request_of(LONG, GREEDY), request_of(LONG + 1, GREEDY)
    _, ends = run(engine_of(tiny_model, LONG + 60 + SLACK), [hog], [other])
    assert (preempted, ends) == ([], [0, 1])


def test_key_does_not_preempt_itself(tiny_model, preempted, engine_of):
    hogs = [request_of(LONG, GREEDY), request_of(SHORT, GREEDY)]
    other = request_of(SHORT + 1, SamplingParams(max_tokens=5))
    run(engine_of(tiny_model, ROWS), hogs, [other], ("hog", "hog"))
    assert preempted == []


def test_key_that_has_used_more_preempts_nothing(tiny_model, preempted, engine_of):
    engine = engine_of(tiny_model, ROWS)
    begin = engine._scheduler.begin_step

    def charged(decoding: Any) -> None:
        begin(decoding)
        engine._scheduler.charge("other", 10_000)

    engine._scheduler.begin_step = charged  # type: ignore[method-assign]
    hogs = [request_of(LONG, GREEDY), request_of(SHORT, GREEDY)]
    _, ends = run(engine, hogs, [request_of(SHORT + 1, SamplingParams(max_tokens=5))])
    assert preempted == []
    assert ends[0] != 2


def test_row_whose_exits_depend_on_tokens_is_not_preempted(preempted, engine_of):
    model = random_model(exit_gate=True)
    hogs = [request_of(LONG, GREEDY, Gate(0.5, 2)), request_of(SHORT, GREEDY)]
    other = request_of(SHORT + 1, SamplingParams(max_tokens=5))
    run(engine_of(model, ROWS), hogs, [other])
    assert [one.prompt for one in preempted] in ([], [hogs[1].prompt])


def test_preempted_row_starts_before_later_rows_of_its_key(tiny_model, preempted, engine_of, monkeypatch):
    hogs = [request_of(LONG, GREEDY), request_of(SHORT, GREEDY)]
    other, late = (request_of(SHORT + more, SamplingParams(max_tokens=5)) for more in (1, 2))
    engine, started = engine_of(tiny_model, ROWS), list[int]()
    start, submit = Scheduler.start, engine.submit

    def watched(self: Scheduler, item: Any) -> None:
        started.append(len(item.prompt))
        start(self, item)

    def with_a_late_one(requests: list[Request]) -> None:
        if requests[0].prompt == other.prompt:
            submit([replace(late, ctx=RequestContext("hog"))])
        submit(requests)

    monkeypatch.setattr(Scheduler, "start", watched)
    engine.submit = with_a_late_one  # type: ignore[method-assign]
    run(engine, hogs, [other])
    assert [one.prompt for one in preempted] == [hogs[0].prompt]
    assert started[:4] == [LONG, SHORT, SHORT + 1, LONG]
