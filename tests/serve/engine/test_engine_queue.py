"""The engine as its callers have it: queues, deadlines, keys side by side, faults and the end."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwm.core.kv_cache import KVCache
from loopwm.text.world_batch import PASS_TOKENS
from serve.engine.engine import DeadlineError, Engine, EngineStoppedError, QueueFullError
from serve.engine.forward import PADDING, ModelRunner, score
from serve.engine.requests import Request, RequestContext, WorkItem
from serve.engine.sampling import SamplingParams
from serve.limits import Limits
from tests.fixtures.engine import DEPTH, NEVER, Collector, Starter, alone, counted, fail, random_prompt
from tests.fixtures.service import wait_until


def test_a_full_queue_refuses_new_callers_and_nothing_of_those_who_are_in(tiny_model, requests):
    with Engine(tiny_model, NEVER, Limits(max_batch=1, max_queue=1)) as engine:
        one, two = engine.admit(), engine.admit()
        with pytest.raises(QueueFullError) as refused:
            engine.admit()
        assert refused.value.retry_after >= 1
        heard = [Collector(requests[0]) for _ in range(5)]
        for collector in heard:
            engine.submit([replace(collector.request, ctx=one)])
        assert all(wait_until(collector.over.is_set) for collector in heard)
        assert all(len(collector.tokens) == requests[0].params.max_tokens for collector in heard)
        engine.release(two)
        engine.release(engine.admit())


def test_admit_full_queue_of_one_key_takes_another(tiny_model):
    with Engine(tiny_model, NEVER, Limits(max_batch=2, max_queue=4)) as engine:
        for _ in range(6):
            engine.admit("hog")
        for _ in range(3):  # its share of 6 places between two keys
            engine.admit("other")
        for key in ("hog", "other"):
            with pytest.raises(QueueFullError):
                engine.admit(key)
        engine.admit("third")


def test_batch_full_of_one_keys_rows_takes_another_key(tiny_model):
    long, short = SamplingParams(max_tokens=2000), SamplingParams(max_tokens=3)
    with Engine(tiny_model, NEVER, Limits(max_batch=2)) as engine:
        hogs = [Collector(Request(random_prompt(9, seed), long, DEPTH)) for seed in range(4)]
        for hog in hogs:
            engine.submit([replace(hog.request, ctx=engine.admit("hog"))])
        assert wait_until(lambda: all(hog.tokens for hog in hogs[:2]))
        others = [Collector(Request(random_prompt(9, seed), short, DEPTH)) for seed in range(9, 12)]
        for other in others:
            engine.submit([replace(other.request, ctx=engine.admit("other"))])
        assert all(wait_until(other.over.is_set) for other in others)
        assert not any(hog.over.is_set() for hog in hogs)
        assert not any(hog.tokens for hog in hogs[2:])  # they wait for the key's own rows
        assert engine.load[0] <= 4


def test_batch_never_exceeds_twice_its_rows(tiny_model):
    with Engine(tiny_model, NEVER, Limits(max_batch=2)) as engine:
        rows = [Collector(Request(random_prompt(9, seed), SamplingParams(max_tokens=2000), DEPTH)) for seed in range(9)]
        for number, row in enumerate(rows):
            engine.submit([replace(row.request, ctx=engine.admit(f"key {number}"))])
        assert wait_until(lambda: sum(len(row.tokens) > 20 for row in rows) >= 4)
        assert sum(bool(row.tokens) for row in rows) == 4


def test_engine_that_makes_no_progress_is_noticed(tiny_model, monkeypatch):
    monkeypatch.setattr("serve.engine.engine.STALL_SECONDS", 0.05)
    blocked = threading.Event()

    def block():
        wait_until(blocked.is_set)
        yield Sum("block", 0, [])

    with Engine(tiny_model, NEVER) as engine:
        assert engine.progressing
        engine.add(WorkItem(steps=block()))
        assert wait_until(lambda: not engine.progressing)
        blocked.set()
        assert wait_until(lambda: engine.progressing)


def test_who_is_past_the_deadline_hears_so_wherever_it_is(tiny_model, requests):
    request = Request(requests[3].prompt, SamplingParams(max_tokens=3000), DEPTH)
    with Engine(tiny_model, NEVER, Limits(max_batch=1)) as engine:
        running, waiting, after = Collector(request), Collector(request), Collector(requests[0])
        contexts = [engine.admit(seconds=600) for _ in range(2)]
        for collector, ctx in zip((running, waiting, after), (*contexts, engine.admit()), strict=True):
            engine.submit([replace(collector.request, ctx=ctx)])
        assert wait_until(lambda: bool(running.tokens))
        for ctx in contexts:
            ctx.deadline = time.monotonic()
        assert all(wait_until(collector.over.is_set) for collector in (running, waiting, after))
    assert isinstance(running.last.error, DeadlineError)
    assert isinstance(waiting.last.error, DeadlineError)
    assert running.tokens
    assert not waiting.tokens
    assert len(after.tokens) == requests[0].params.max_tokens


def test_a_key_with_little_work_does_not_wait_for_one_with_much(tiny_model):
    """A hundred long prompts of one key are in before one of another."""
    order: list[str] = []
    prompts = [random_prompt(300, seed) for seed in range(20)]
    queued, over = threading.Event(), threading.Event()

    def block():
        wait_until(queued.is_set)
        yield Sum("block", 0, [])

    with Engine(tiny_model, NEVER, Limits(max_batch=2)) as engine:
        engine.add(WorkItem(steps=block()))
        for i, prompt in enumerate([*prompts, random_prompt(300, 99)]):
            name = "much" if i < len(prompts) else "little"
            work = score(engine.runner, prompt, DEPTH, 1)

            def deliver(_: Any, name: str = name) -> None:
                order.append(name)
                if len(order) > len(prompts):
                    over.set()

            engine.add(WorkItem(steps=work, deliver=deliver, ctx=RequestContext(name)))
        queued.set()
        assert wait_until(over.is_set)
    assert order.index("little") <= 4


def test_keys_share_the_engine_by_tokens_not_by_forwards(tiny_model):
    """Ten long prompts of one key are in before a hundred short ones of another."""
    order: list[str] = []
    queued, over = threading.Event(), threading.Event()

    def block():
        wait_until(queued.is_set)
        yield Sum("block", 0, [])

    with Engine(tiny_model, NEVER) as engine:
        engine.add(WorkItem(steps=block()))
        for name, count, length in (("long", 10, 320), ("short", 100, 32)):

            def deliver(_: Any, name: str = name) -> None:
                order.append(name)
                if len(order) == 110:
                    over.set()

            ctx = RequestContext(name)
            for seed in range(count):
                work = score(engine.runner, random_prompt(length, seed), DEPTH, 1)
                engine.add(WorkItem(steps=work, deliver=deliver, ctx=ctx))
        queued.set()
        assert wait_until(over.is_set)
    sixth = [i for i, name in enumerate(order) if name == "long"][5]
    assert order[:sixth].count("short") >= 40


def test_rows_go_on_beside_a_long_prompt(tiny_model, monkeypatch):
    """Between two tokens of a row there are never more tokens of others than the budget."""
    sizes = counted(tiny_model, monkeypatch)
    with Engine(tiny_model, NEVER, Limits(prefill_tokens_with_decodes=32)) as engine:
        long = Collector(Request(random_prompt(1000, 1), SamplingParams(max_tokens=1), DEPTH))
        row = Starter(
            Request((9, 9), SamplingParams(max_tokens=60), DEPTH), start=lambda: engine.submit([long.request])
        )
        engine.submit([row.request])
        assert wait_until(row.over.is_set)
        assert wait_until(long.over.is_set)
    assert sum(sizes) >= 1059
    assert max(sizes) == 32


@pytest.mark.parametrize(("key", "whole"), [("greedy", 0), ("other", 1)])
def test_a_key_beside_a_greedy_one_prefills_its_first_prompt_whole(tiny_model, monkeypatch, key, whole):
    """The second one has to wait until the greedy key has used as much."""
    sizes = counted(tiny_model, monkeypatch)
    with Engine(tiny_model, NEVER, Limits(prefill_tokens_with_decodes=8)) as engine:
        greedy, ctx = engine.admit("greedy"), engine.admit(key)
        once = SamplingParams(max_tokens=1)
        prompts = [Collector(Request(random_prompt(length, length), once, DEPTH, ctx=ctx)) for length in (300, 200)]
        requests = [Request((9, 9), SamplingParams(max_tokens=90), DEPTH, ctx=greedy) for _ in range(4)]
        first = Starter(requests[0], start=lambda: [engine.submit([prompt.request]) for prompt in prompts])
        rows = [first, *map(Collector, requests[1:])]
        engine.submit([row.request for row in rows])
        assert all(wait_until(row.over.is_set) for row in (*rows, *prompts))
    assert (sizes.count(299), sizes.count(199)) == (whole, 0)


def test_an_item_runs_one_forward_between_two_tokens(tiny_model):
    row = Collector(Request((9, 9), SamplingParams(max_tokens=60), DEPTH))
    tokens: list[int] = []

    def small_forwards():
        for _ in range(20):
            yield Sum("small", 0, [])
            tokens.append(len(row.tokens))

    with Engine(tiny_model, NEVER) as engine:
        engine.submit([row.request])
        engine.add(WorkItem(steps=small_forwards()))
        assert wait_until(row.over.is_set)
    assert all(later > earlier for earlier, later in itertools.pairwise(tokens))


def test_few_small_passes_run_between_two_tokens(tiny_model):
    passes = Counter[int]()

    def small(number: int) -> Iterator[Any]:
        yield Sum(f"shape {number}", 1, [])
        passes[len(row.tokens)] += 1

    def start() -> None:
        for number in range(20):
            engine.add(WorkItem(steps=small(number)))

    with Engine(tiny_model, NEVER, Limits(max_num_batched_tokens=2 * PASS_TOKENS)) as engine:
        row = Starter(Request((9, 9), SamplingParams(max_tokens=60), DEPTH), start=start)
        engine.submit([row.request])
        assert wait_until(row.over.is_set)
    assert sum(passes.values()) == 20
    assert max(passes.values()) == 2


def test_an_idle_engine_forgets_what_keys_have_used(tiny_model, requests, monkeypatch):
    monkeypatch.setattr("serve.engine.engine.IDLE_SECONDS", 0.01)
    collector = Collector(requests[0])
    with Engine(tiny_model, NEVER) as engine:
        engine.submit([collector.request])
        assert wait_until(collector.over.is_set)
        assert wait_until(lambda: not engine._scheduler._scheduled_tokens)


def test_many_who_wait_get_as_much_as_the_few_who_decode(tiny_model, monkeypatch):
    """Twice the tokens between two of theirs where two wait for each; never more than where nobody decodes."""
    sizes = counted(tiny_model, monkeypatch)
    with Engine(tiny_model, NEVER, Limits(prefill_tokens_with_decodes=32, max_num_batched_tokens=80)) as engine:
        prompts = [
            Collector(Request(random_prompt(1000, seed), SamplingParams(max_tokens=1), DEPTH)) for seed in range(6)
        ]
        row = Starter(
            Request((9, 9), SamplingParams(max_tokens=90), DEPTH),
            start=lambda: [engine.submit([one.request]) for one in prompts[:2]],
        )
        engine.submit([row.request])
        assert all(wait_until(one.over.is_set) for one in prompts[:2])
        assert 32 < max(sizes) <= 64
        assert 64 in sizes
        with engine._changed:
            for one in prompts[2:]:
                engine.submit([one.request])
        assert all(wait_until(one.over.is_set) for one in prompts)
        assert 80 <= max(sizes) < 80 + 2 * PADDING  # where two pieces share a pass
        assert 80 in sizes
        row.request.cancelled = True


@pytest.mark.parametrize("goes_on_from_a_world", [False, True])
def test_afailing_batch_reaches_its_requests_and_the_engine_goes_on(
    tiny_model, requests, monkeypatch, goes_on_from_a_world
):
    seen = KVCache(1, torch.device("cpu"))
    ModelRunner(tiny_model).decode(seen, [requests[1].prompt], DEPTH)
    request = replace(requests[0], start=seen.share(1)) if goes_on_from_a_world else requests[0]
    with Engine(tiny_model, NEVER) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny_model.model), "forward", fail)
            broken = Collector(request)
            engine.submit([broken.request])
            assert wait_until(broken.over.is_set)
        assert isinstance(broken.last.error, MemoryError)
        healthy = Collector(requests[0])
        engine.submit([healthy.request])
        assert wait_until(healthy.over.is_set)
        assert healthy.tokens == alone(tiny_model, requests[0]).tokens


def test_a_stopped_engine_tells_who_waits_and_takes_nobody(tiny_model, requests):
    collectors = [Collector(Request(requests[3].prompt, SamplingParams(max_tokens=3000), DEPTH)) for _ in range(3)]
    with Engine(tiny_model, NEVER, Limits(max_batch=1)) as engine:
        for collector in collectors:
            engine.submit([collector.request])
    assert all(isinstance(collector.last.error, EngineStoppedError) for collector in collectors)
    with pytest.raises(EngineStoppedError):
        engine.submit([collectors[0].request])


@dataclass(frozen=True)
class Sum:
    """A pass that adds its number to those of the others; some numbers cannot be added."""

    key: str
    number: int
    taken: list[int]
    num_tokens: int = 1

    def split(self, max_tokens: int) -> Sum:
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
        wait_until(blocked.is_set)
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
        engine.add(WorkItem(steps=block()))
        for key, *numbers in (("a", 1, 10), ("b", 5), ("a", 2), ("c", 1), ("c", -1)):
            engine.add(WorkItem(steps=work(key, *numbers), deliver=deliver))
        cancelled = WorkItem(steps=work("a", 4), deliver=deliver)
        cancelled.cancelled = True
        engine.add(cancelled)
        blocked.set()
        assert wait_until(over.is_set)
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
    monkeypatch.setattr("serve.engine.engine.IDLE_SECONDS", 0.05)

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
        engine.add(WorkItem(steps=hold(), deliver=lambda result: (kept.append(result), over.set())))
        assert wait_until(over.is_set)
        assert wait_until(lambda: resident() < held_mib[0] - 200)
