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

from loopwm.core import CoreState, Fixed, SharedState
from loopwm.core.buffers import SLACK
from loopwm.text.tokenizer import load_tokenizer
from serve.engine.batch import MAX_PREFILL, Batch, Passes, prefill_group
from serve.engine.engine import Engine, EngineStoppedError, Limits, QueueFullError
from serve.engine.prefixes import BLOCK, PrefixCache, shared_prefix
from serve.engine.requests import Event, Finish, Request, Ticket
from serve.engine.sampling import Sampling, choose, nucleus

NEVER = -1
DEPTH = Fixed(2)


class Collector:
    """Everything an engine delivers for one request."""

    def __init__(self, request: Request) -> None:
        self.tokens: list[int] = []
        self.loops: list[int] = []
        self.last = Event()
        self.over = threading.Event()
        self.ticket = Ticket(request, self)

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


def alone(model: Any, request: Request, end_token: int = NEVER) -> Collector:
    collector = Collector(request)
    batch = Batch(model, end_token)
    batch.admit([collector.ticket])
    while len(batch):
        batch.step()
    return collector


def test_tokens_are_those_of_the_model_without_any_cache(tiny_model, requests):
    request = requests[0]
    ids = list(request.prompt)
    for _ in range(request.max_tokens):
        ids.append(int(tiny_model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert alone(tiny_model, request).tokens == ids[len(request.prompt) :]


def test_tokens_do_not_depend_on_what_else_is_in_the_batch(tiny_model, requests):
    together = [Collector(request) for request in requests]
    batch = Batch(tiny_model, NEVER)
    batch.admit([c.ticket for c in together[:2]])
    batch.step()
    batch.step()
    batch.admit([c.ticket for c in together[2:]])  # late, longer and shorter than what runs
    while len(batch):
        batch.step()
    for collector, request in zip(together, requests, strict=True):
        assert collector.tokens == alone(tiny_model, request).tokens
        assert len(collector.tokens) == request.max_tokens
        assert collector.last.finish == Finish.LENGTH


def test_the_end_token_ends_a_request_and_is_not_delivered(tiny_model, requests):
    free = alone(tiny_model, requests[1]).tokens
    end = next(token for i, token in enumerate(free) if i > 0 and token not in free[:i])
    stopped = alone(tiny_model, requests[1], end_token=end)
    assert stopped.tokens == free[: free.index(end)]
    assert stopped.last.finish == Finish.STOP


def test_a_cancelled_row_leaves_and_the_others_are_untouched(tiny_model, requests):
    one, two = Collector(requests[0]), Collector(requests[1])
    batch = Batch(tiny_model, NEVER)
    batch.admit([one.ticket, two.ticket])
    batch.step()
    one.ticket.cancelled = True
    batch.step()
    assert (len(batch), len(one.tokens)) == (1, 1)
    while len(batch):
        batch.step()
    assert two.tokens == alone(tiny_model, requests[1]).tokens


def test_depth_is_the_number_of_loops(tiny_model, requests):
    for loops in (1, 3):
        request = replace(requests[0], depth=Fixed(loops), max_tokens=1)
        expected = tiny_model(torch.tensor([request.prompt]), depth=loops).logits[0, -1].argmax()
        collector = alone(tiny_model, request)
        assert collector.tokens == [expected]
        assert collector.loops == [loops]


def test_a_common_beginning_is_found_in_blocks_and_leaves_every_prompt_a_token():
    head = tuple(range(2 * BLOCK))
    assert shared_prefix([(*head, 5, 6), (*head, 7)]) == 2 * BLOCK
    assert shared_prefix([head, head]) == BLOCK
    assert shared_prefix([head[:3], head[:3]]) == 0, "too short to be worth a pass"
    assert shared_prefix([head]) == 0


def group(*prompts: tuple[int, ...]) -> list[int]:
    return prefill_group(Request(prompt, 1, Sampling(), DEPTH) for prompt in prompts)


def test_prompts_run_together_while_their_own_parts_are_short():
    short, long = random_prompt(60, 1), random_prompt(MAX_PREFILL, 2)
    assert group() == []
    assert group(long, short) == [0], "a long one alone, however long"
    assert group(short, short, short, long) == [0, 1, 2], "it would cost the short ones its padding"
    assert len(group(*(random_prompt(60, seed) for seed in range(50)))) == MAX_PREFILL // 60
    assert group(short, random_prompt(40, 3)) == [0, 1]
    assert len(group(*((*long, seed) for seed in range(20)))) == 20, "what they share runs once"


def test_prompts_of_another_depth_wait_for_the_next_pass():
    one, two = (Request(random_prompt(9, 1), 1, Sampling(), Fixed(loops)) for loops in (1, 2))
    assert prefill_group([one, two, one]) == [0, 2]


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows times columns of every pass from now on."""
    sizes: list[int] = []
    forward = type(model.model).forward

    def counting(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tokens.numel())
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", counting)
    return sizes


def test_a_prompt_that_begins_like_a_former_one_runs_its_own_part_alone(tiny_model, requests, monkeypatch):
    head = random_prompt(3 * BLOCK, 8)
    asked = [Request(head + random_prompt(5, seed), 3, Sampling(), DEPTH) for seed in range(4)]
    expected = [alone(tiny_model, request).tokens for request in asked]
    batch, collectors = Batch(tiny_model, NEVER), [Collector(request) for request in asked]
    sizes = counted(tiny_model, monkeypatch)
    batch.admit([collectors[0].ticket])
    batch.admit([c.ticket for c in collectors[1:3]])
    batch.admit([collectors[3].ticket])
    assert sizes == [3 * BLOCK + 5, 10, 5]
    assert len(batch.cohorts) == 2, "the last one joins those that share what it begins with"
    while len(batch):
        batch.step()
    assert [c.tokens for c in collectors] == expected


def test_the_cache_keeps_what_was_used_last_and_never_more_than_its_bytes():
    def state(length: int) -> CoreState:
        made = CoreState(1, torch.device("cpu"))
        made.extend(torch.ones(1, length, dtype=torch.bool))
        made.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), 0)
        return made

    cache = PrefixCache(2 * 2 * BLOCK * 8)
    prompts = [random_prompt(2 * BLOCK, seed) for seed in range(3)]
    for prompt in prompts[:2]:
        cache.put(prompt, 2, state(2 * BLOCK))
    longer = [(*prompt, 1) for prompt in prompts]
    found = cache.find(longer[0], 2)
    assert found is not None
    assert found.length == 2 * BLOCK
    assert found is cache.find((*longer[0], 7), 2)
    assert cache.find(longer[0], 3) is None, "keys and values of another depth are other ones"
    assert cache.find(prompts[0], 2).length == BLOCK, "a token must be left to run"
    cache.put(prompts[2], 2, state(2 * BLOCK))
    assert cache.find(longer[1], 2) is None
    assert cache.find(longer[0], 2) is found
    assert cache.nbytes() == 2 * 2 * BLOCK * 8
    cache.put(random_prompt(9 * BLOCK, 7), 2, state(9 * BLOCK))
    assert cache.nbytes() == 9 * BLOCK * 8, "the newest stays whatever its size"


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    assert nucleus(probabilities, 0.7).tolist() == pytest.approx([0, 0.5, 0, 0.25])
    assert nucleus(probabilities, 0.75).tolist() == pytest.approx([0, 0.5, 0, 0.25])
    for tiny in (0.01, 1e-46):  # the second is zero in float32
        assert nucleus(probabilities, tiny).tolist() == pytest.approx([0, 0.5, 0, 0])


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampling = Sampling(temperature=2.0, seed=1)
    generator = sampling.generator()
    draws = torch.tensor([choose(logits, sampling, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=3) / len(draws)
    torch.testing.assert_close(shares, (logits / 2).softmax(-1), atol=0.03, rtol=0)


def test_a_full_queue_refuses_and_a_cancelled_request_makes_room(tiny_model, requests):
    request = Request(requests[3].prompt, 3000, Sampling(), DEPTH)
    with Engine(tiny_model, NEVER, Limits(max_batch=1, max_queue=1)) as engine:
        running, waiting, third = (Collector(request) for _ in range(3))
        ticket = engine.submit(request, running)
        while engine.load != (1, 0):
            pass
        waiting_ticket = engine.submit(request, waiting)
        with pytest.raises(QueueFullError):
            engine.submit(request, third)
        engine.cancel(waiting_ticket)
        engine.submit(requests[0], third)
        engine.cancel(ticket)
        assert third.over.wait(30)
        assert len(third.tokens) == requests[0].max_tokens
        assert not waiting.tokens


@pytest.mark.parametrize("goes_on_from_a_world", [False, True])
def test_a_failing_batch_reaches_its_requests_and_the_engine_goes_on(
    tiny_model, requests, monkeypatch, goes_on_from_a_world
):
    seen = CoreState(1, torch.device("cpu"))
    Passes(tiny_model).tokens(seen, [requests[1].prompt], DEPTH)
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
            engine.submit(collector.ticket.request, collector)
    assert all(isinstance(collector.last.error, EngineStoppedError) for collector in collectors)
    with pytest.raises(EngineStoppedError):
        engine.submit(requests[0], collectors[0])


@dataclass(frozen=True)
class Sum:
    """A pass that adds its number to those of the others; some numbers cannot be added."""

    key: str
    number: int
    taken: list[int]

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
        yield None
        blocked.wait(30)

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
        yield None
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
