"""Token ids: a request's tokens are its own, whatever else is in the batch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwm.core import CoreState, Fixed, SharedState, allocated_bytes
from loopwm.core.buffers import SLACK
from loopwm.text.tokenizer import load_tokenizer
from serve.engine.batch import RunningBatch
from serve.engine.engine import DeadlineError, Engine, EngineStoppedError, Limits, QueueFullError
from serve.engine.kv_cache import BLOCK, KVCache
from serve.engine.passes import Forward, Steps, Task, results
from serve.engine.prefill import prefill, score
from serve.engine.requests import Caller, Event, Finish, Request
from serve.engine.requests import Sequence as Row
from serve.engine.sampling import Sampling

NEVER = -1
DEPTH = Fixed(2)


class Collector:
    """Everything an engine delivers for one request."""

    def __init__(self, request: Request) -> None:
        self.tokens: list[int] = []
        self.loops: list[int] = []
        self.last = Event()
        self.over = threading.Event()
        self.row = Row(request, self)

    def __call__(self, event: Event) -> None:
        self.last = event
        if event.token is not None:
            self.tokens.append(event.token)
            self.loops.append(event.loops)
        if event.finish or event.error:
            self.over.set()


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(9, len(load_tokenizer()), (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy and sampled ones of different lengths; two share their first 20 tokens."""
    shared = random_prompt(20, 9)
    return [
        Request(shared + random_prompt(5, 1), 9, Sampling(), DEPTH),
        Request(shared + random_prompt(12, 2), 14, Sampling(1.0, 0.9, 3), DEPTH),
        Request(random_prompt(30, 3), 5, Sampling(0.7, 1.0, 4), DEPTH),
        Request(random_prompt(3, 4), SLACK + 9, Sampling(), DEPTH),
        Request(random_prompt(3, 4), 12, Sampling(1.5, 0.95, 5), DEPTH),
    ]


def run(steps: Steps[Any], most: int = 1 << 20) -> Any:
    """What work comes to, its passes cut to `most` tokens."""
    try:
        asked = next(steps)
        while True:
            (result,) = results([asked.within(most)])
            asked = steps.throw(result) if isinstance(result, Exception) else steps.send(result)
    except StopIteration as end:
        return end.value


class Model:
    """A running batch, and prompts that are run for it."""

    def __init__(self, model: Any, end_token: int = NEVER, most: int = 1 << 20) -> None:
        self.forward, self.cache, self.most = Forward(model), KVCache(1 << 40), most
        self.batch = RunningBatch(self.forward, end_token)

    def add(self, *collectors: Collector) -> None:
        for collector in collectors:
            request = collector.row.request
            work = prefill(self.forward, self.cache, request.prompt[:-1], request.depth.limit)
            self.batch.add(collector.row, run(work, self.most))

    def finish(self) -> None:
        while len(self.batch):
            self.batch.step()


def alone(model: Any, request: Request, end_token: int = NEVER) -> Collector:
    collector, made = Collector(request), Model(model, end_token)
    made.add(collector)
    made.finish()
    return collector


def test_tokens_are_those_of_the_model_without_any_cache(tiny_model, requests):
    request = requests[0]
    ids = list(request.prompt)
    for _ in range(request.max_tokens):
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
        assert len(collector.tokens) == request.max_tokens
        assert collector.last.finish == Finish.LENGTH


def test_scores_do_not_depend_on_the_pieces_of_the_prompt(tiny_model):
    prompt = random_prompt(50, 1)
    whole, pieces = (run(score(Forward(tiny_model), prompt, DEPTH, 2), most) for most in (99, 9))
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
    one.row.cancelled = True
    made.batch.step()
    assert (len(made.batch), len(one.tokens)) == (1, 1)
    made.finish()
    assert two.tokens == alone(tiny_model, requests[1]).tokens


def test_a_row_that_fails_is_alone_with_it(tiny_model, requests, monkeypatch):
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
    unluckily = Collector(replace(requests[4], sampling=Sampling(temperature=float("nan"))))
    made.add(*heard, broken, unluckily)
    made.finish()
    assert isinstance(broken.last.error, MemoryError)
    assert isinstance(unluckily.last.error, RuntimeError)
    assert [collector.tokens for collector in heard] == expected


def test_who_can_neither_run_together_nor_be_copied_apart_hears_it(tiny_model, requests, monkeypatch):
    heard, made = [Collector(request) for request in requests[:3]], Model(tiny_model)
    made.add(*heard)
    monkeypatch.setattr(type(tiny_model.model), "forward", _fail)
    monkeypatch.setattr(CoreState, "alone", _fail)
    made.finish()
    assert all(isinstance(collector.last.error, MemoryError) for collector in heard)


def test_a_row_that_cannot_join_is_alone_with_it(tiny_model, requests, monkeypatch):
    add = RunningBatch.add

    def adds_but_one(self: RunningBatch, row: Row, state: CoreState) -> None:
        return _fail() if row.request is requests[1] else add(self, row, state)

    monkeypatch.setattr(RunningBatch, "add", adds_but_one)
    heard = [Collector(request) for request in requests[:3]]
    with Engine(tiny_model, NEVER) as engine:
        for collector in heard:
            engine.submit(collector.row.request, collector)
        assert all(collector.over.wait(30) for collector in heard)
    assert [isinstance(collector.last.error, MemoryError) for collector in heard] == [False, True, False]


def test_what_has_begun_has_its_memory_before_others_begin(tiny_model, monkeypatch):
    """Two long prompts, each at more loops than usual, of which memory holds one."""
    asked = [Request(random_prompt(300, seed), 2, Sampling(), Fixed(4)) for seed in range(2)]
    token = Forward(tiny_model).token_bytes(4)
    assert token > Forward(tiny_model).token_bytes(2)
    heard, begun = [Collector(request) for request in asked], []
    advance = Task.advance

    def watched(self: Task, result: Any) -> bool:
        if not self.begun:
            begun.append(sum(collector.over.is_set() for collector in heard))
        return advance(self, result)

    monkeypatch.setattr(Task, "advance", watched)
    with Engine(tiny_model, NEVER, Limits(cache_bytes=allocated_bytes() + 500 * token)) as engine:
        for request, collector in zip(asked, heard, strict=True):
            engine.submit(request, collector)
        assert all(collector.over.wait(60) for collector in heard)
    assert begun == [0, 1]


def test_depth_is_the_number_of_loops(tiny_model, requests):
    for loops in (1, 3):
        request = replace(requests[0], depth=Fixed(loops), max_tokens=1)
        expected = tiny_model(torch.tensor([request.prompt]), depth=loops).logits[0, -1].argmax()
        collector = alone(tiny_model, request)
        assert collector.tokens == [expected]
        assert collector.loops == [loops]


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows times columns of every pass from now on."""
    sizes: list[int] = []
    forward = type(model.model).forward

    def counting(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tokens.numel())
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", counting)
    return sizes


def test_a_prompt_that_begins_like_a_former_one_runs_its_own_part_alone(tiny_model, monkeypatch):
    head = random_prompt(3 * BLOCK + 3, 8)
    asked = [Request(head + random_prompt(5, seed), 3, Sampling(), DEPTH) for seed in range(3)]
    expected = [alone(tiny_model, request).tokens for request in asked]
    made, collectors = Model(tiny_model), [Collector(request) for request in (*asked, asked[0])]
    sizes = counted(tiny_model, monkeypatch)
    made.add(*collectors)
    assert sizes == [len(head) + 4, 4, 4], "the last one is known whole, but for the token that is left to run"
    made.finish()
    assert [c.tokens for c in collectors] == [*expected, expected[0]]


def test_choices_of_one_prompt_run_and_keep_it_once(tiny_model, monkeypatch):
    request = Request(random_prompt(200, 8), 4, Sampling(1.0, 1.0, 3), DEPTH)
    requests = [replace(request, sampling=Sampling(1.0, 1.0, seed)) for seed in range(3)]
    expected = [alone(tiny_model, request).tokens for request in requests]
    heard = [Collector(request) for request in requests]
    with Engine(tiny_model, NEVER) as engine:
        sizes = counted(tiny_model, monkeypatch)
        engine.submit_all(requests, heard)
        assert all(collector.over.wait(30) for collector in heard)
    assert [collector.tokens for collector in heard] == expected
    assert sizes == [199, 3, 3, 3, 3]


def test_a_full_queue_refuses_new_callers_and_nothing_of_those_who_are_in(tiny_model, requests):
    with Engine(tiny_model, NEVER, Limits(max_batch=1, max_queue=1)) as engine:
        one, two = engine.enter(), engine.enter()
        with pytest.raises(QueueFullError) as refused:
            engine.enter()
        assert refused.value.retry_after >= 1
        heard = [Collector(requests[0]) for _ in range(5)]
        for collector in heard:
            engine.submit(requests[0], collector, one)
        assert all(collector.over.wait(30) for collector in heard)
        assert all(len(collector.tokens) == requests[0].max_tokens for collector in heard)
        engine.leave(two)
        engine.leave(engine.enter())


def test_who_is_past_the_deadline_hears_so_wherever_it_is(tiny_model, requests):
    request = Request(requests[3].prompt, 3000, Sampling(), DEPTH)
    with Engine(tiny_model, NEVER, Limits(max_batch=1)) as engine:
        running, waiting, after = (Collector(request) for _ in range(3))
        engine.submit(request, running, engine.enter(seconds=0.5))
        engine.submit(request, waiting, engine.enter(seconds=0.1))
        engine.submit(requests[0], after, engine.enter())
        assert all(collector.over.wait(30) for collector in (running, waiting, after))
    assert isinstance(running.last.error, DeadlineError)
    assert isinstance(waiting.last.error, DeadlineError)
    assert running.tokens
    assert not waiting.tokens
    assert len(after.tokens) == requests[0].max_tokens


def test_a_key_with_little_work_does_not_wait_for_one_with_much(tiny_model):
    """A hundred long prompts of one key are in before one of another."""
    order: list[str] = []
    prompts = [random_prompt(300, seed) for seed in range(20)]
    with Engine(tiny_model, NEVER, Limits(max_batch=2)) as engine:
        over = threading.Event()
        for i, prompt in enumerate([*prompts, random_prompt(300, 99)]):
            name = "much" if i < len(prompts) else "little"
            work = score(engine.forward, prompt, DEPTH, 1)

            def deliver(_: Any, name: str = name) -> None:
                order.append(name)
                if len(order) > len(prompts):
                    over.set()

            engine.work(work, deliver, Caller(name))
        assert over.wait(60)
    assert order.index("little") <= 4


def test_rows_go_on_beside_a_long_prompt(tiny_model, monkeypatch):
    """Between two tokens of a row there are never more tokens of others than the budget."""
    sizes = counted(tiny_model, monkeypatch)
    with Engine(tiny_model, NEVER, Limits(tokens_beside=32)) as engine:
        row, long = (
            Collector(Request((9, 9), 60, Sampling(), DEPTH)),
            Collector(Request(random_prompt(1000, 1), 1, Sampling(), DEPTH)),
        )
        engine.submit(row.row.request, row)
        while not row.tokens:
            time.sleep(0.001)
        engine.submit(long.row.request, long)
        assert row.over.wait(60)
        assert long.over.wait(60)
    assert sum(sizes) >= 1059
    assert max(sizes) == 32


@pytest.mark.parametrize("goes_on_from_a_world", [False, True])
def test_a_failing_batch_reaches_its_requests_and_the_engine_goes_on(
    tiny_model, requests, monkeypatch, goes_on_from_a_world
):
    seen = CoreState(1, torch.device("cpu"))
    Forward(tiny_model).tokens(seen, [requests[1].prompt], DEPTH)
    request = replace(requests[0], start=SharedState(seen, 1)) if goes_on_from_a_world else requests[0]
    with Engine(tiny_model, NEVER) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny_model.model), "forward", _fail)
            broken = Collector(request)
            engine.submit(request, broken)
            assert broken.over.wait(30)
        assert isinstance(broken.last.error, MemoryError)
        healthy = Collector(requests[0])
        engine.submit(requests[0], healthy)
        assert healthy.over.wait(30)
        assert healthy.tokens == alone(tiny_model, requests[0]).tokens


def _fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


def test_a_stopped_engine_tells_who_waits_and_takes_nobody(tiny_model, requests):
    collectors = [Collector(Request(requests[3].prompt, 3000, Sampling(), DEPTH)) for _ in range(3)]
    with Engine(tiny_model, NEVER, Limits(max_batch=1)) as engine:
        for collector in collectors:
            engine.submit(collector.row.request, collector)
    assert all(isinstance(collector.last.error, EngineStoppedError) for collector in collectors)
    with pytest.raises(EngineStoppedError):
        engine.submit(requests[0], collectors[0])


@dataclass(frozen=True)
class Sum:
    """A pass that adds its number to those of the others; some numbers cannot be added."""

    key: str
    number: int
    taken: list[int]
    tokens: int = 1

    def within(self, tokens: int) -> Sum:
        return self

    def run(self, others: Sequence[Sum]) -> list[int]:
        numbers = [self.number, *(other.number for other in others)]
        self.taken.append(len(numbers))
        if -1 in numbers:
            raise ArithmeticError("no such number")
        return [sum(numbers) + number for number in numbers]


def test_work_of_one_key_takes_its_passes_together_and_nobody_gets_anothers_error(tiny_model):
    taken: list[int] = []
    blocked, results, over = threading.Event(), [], threading.Event()

    def block():
        blocked.wait(30)
        yield Sum("block", 0, [])

    def work(key: str, *numbers: int):
        heard = []
        for number in numbers:
            heard.append((yield Sum(key, number, taken)))
        return key, heard

    def deliver(result):
        results.append(result)
        if len(results) == 5:
            over.set()

    with Engine(tiny_model, NEVER) as engine:
        engine.work(block(), lambda result: None)
        for key, *numbers in (("a", 1, 10), ("b", 5), ("a", 2), ("c", 1), ("c", -1)):
            engine.work(work(key, *numbers), deliver)
        engine.work(work("a", 4), deliver).cancel()
        blocked.set()
        assert over.wait(30)
    assert sorted(taken) == [1, 1, 1, 1, 2, 2]  # those of c once more, each by itself
    assert sorted(result for result in results if isinstance(result, tuple)) == [
        ("a", [4, 20]),
        ("a", [5]),
        ("b", [10]),
        ("c", [2]),
    ]
    assert [str(result) for result in results if not isinstance(result, tuple)] == ["no such number"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, and only glibc keeps it")
def test_an_idle_engine_gives_memory_back(tiny_model, requests, monkeypatch):
    monkeypatch.setattr("serve.engine.engine.IDLE", 0.05)

    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10

    def hold():
        yield Sum("hold", 0, [])
        held = [torch.ones(1 << 14) for _ in range(5000)]  # 64 KiB each: below what goes back by itself
        held_mib.append(resident())
        del held[1:]
        return held[0]

    held_mib: list[int] = []
    kept: list[torch.Tensor] = []
    over = threading.Event()
    with Engine(tiny_model, NEVER) as engine:
        engine.work(hold(), lambda result: (kept.append(result), over.set()))
        assert over.wait(30)
        for _ in range(200):
            if resident() < held_mib[0] - 200:
                break
            time.sleep(0.05)
        assert resident() < held_mib[0] - 200
