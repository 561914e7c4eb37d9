"""The scheduler on a virtual clock: whatever the keys ask for, each gets its share of the tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve.engine.requests import RequestContext, WorkItem
from serve.engine.scheduler import DECODED_TOKEN, Scheduler

BUDGET = 64
"""Prefill tokens of a step."""


@dataclass(frozen=True)
class Chunk:
    """A forward of tokens that do not depend on a model."""

    num_tokens: int
    key: str = "chunk"

    def split(self, max_tokens: int) -> Chunk:
        return Chunk(min(self.num_tokens, max_tokens))

    def run(self, others: Sequence[Any]) -> list[Any]:
        raise AssertionError("nothing runs here")


@dataclass
class Load:
    """Keys that prefill and decode. work: tokens of each key so far; decoding: rows of each key that decode."""

    scheduler: Scheduler = field(default_factory=Scheduler)
    work: Counter[str] = field(default_factory=Counter)
    decoding: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, tokens: int) -> WorkItem:
        item = WorkItem(ctx=RequestContext(key))
        item.pending = Chunk(tokens)
        self.scheduler.add(item)
        return item

    def step(self) -> None:
        """Decode a token of each row, then prefill the budget, as `Engine._run` does."""
        rows = list(self.decoding.elements())
        self.scheduler.begin_step(rows)
        self.work += Counter({key: DECODED_TOKEN * count for key, count in self.decoding.items()})
        for item in self.scheduler.next_waiting(1 << 30):
            self.scheduler.start(item)
        left, served = BUDGET, set[WorkItem]()
        while left > 0 and (scheduled := self.scheduler.schedule(left, served)):
            for item, chunk in scheduled:
                left -= chunk.num_tokens
                served.add(item)
                self._run(item, chunk.num_tokens)

    def _run(self, item: WorkItem, tokens: int) -> None:
        self.scheduler.charge(item.ctx.key, tokens)
        self.work[item.ctx.key] += tokens
        assert item.pending is not None
        rest = item.pending.num_tokens - tokens
        if rest:
            item.pending = Chunk(rest)
        else:
            self.scheduler.remove(item)

    def run(self, steps: int, sizes: dict[str, int]) -> Counter[str]:
        """Keep 3 items of these sizes queued for each key; return the work of these steps."""
        before = self.work.copy()
        for _ in range(steps):
            queued = Counter(item.ctx.key for item in self.scheduler.items)
            for key, tokens in sizes.items():
                for _ in range(3 - queued[key]):
                    self.add(key, tokens)
            self.step()
        return self.work - before


@pytest.mark.parametrize("seed", range(200))
def test_busy_keys_get_equal_work_whatever_they_ask_for(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"key {i}": rng.choice((1, 5, 60, 300, 2000)) + 22 for i in range(rng.randint(2, 5))}
    load = Load(decoding=Counter({key: rng.choice((0, 0, 3)) for key in sizes}))
    work = load.run(50, sizes)
    assert max(work.values()) - min(work[key] for key in sizes) <= 2 * BUDGET + 3 * DECODED_TOKEN


def test_a_late_key_starts_level_with_the_others() -> None:
    load = Load()
    load.run(500, {"a": 100, "b": 100})
    work = load.run(60, {"a": 100, "b": 100, "late": 100})
    assert all(abs(work[key] - 60 * BUDGET / 3) <= 2 * BUDGET for key in ("a", "b", "late"))


def test_a_key_that_only_decodes_pays_for_it() -> None:
    load = Load(decoding=Counter({"decodes": 8}))
    load.run(100, {"other": 100})
    assert load.work["decodes"] == 800 * DECODED_TOKEN
    work = load.run(60, {"decodes": 100, "other": 100})
    assert abs(work["decodes"] - work["other"]) <= 2 * BUDGET


def test_a_new_key_does_not_pass_one_that_decodes() -> None:
    load = Load(decoding=Counter({"decodes": 4}))
    load.run(1000, {})
    load.run(3, {"new": 100})
    prompt = load.add("decodes", BUDGET)
    load.run(4, {"new": 100})
    assert prompt not in load.scheduler.items


def test_a_key_that_returns_is_not_behind_for_ever() -> None:
    load = Load()
    load.run(500, {"returns": 100})
    load.run(20, {"returns": 100, "other": 100})
    load.scheduler.pop(lambda item: item.ctx.key == "returns")
    load.run(500, {"other": 100})
    work = load.run(60, {"returns": 100, "other": 100})
    assert abs(work["returns"] - work["other"]) <= 2 * BUDGET


def test_items_of_a_key_keep_their_order() -> None:
    load = Load()
    first, second = load.add("a", 5 * BUDGET), load.add("a", 5 * BUDGET)
    for _ in range(5):
        load.step()
    assert load.scheduler.items == [second]
    assert first not in load.scheduler.items


def test_a_forward_beyond_the_budget_runs_by_itself() -> None:
    class Whole(Chunk):
        def split(self, max_tokens: int) -> Chunk:
            return self

    load = Load()
    item = load.add("a", 1)
    item.pending = Whole(3 * BUDGET)
    load.step()
    assert load.work["a"] == 3 * BUDGET
