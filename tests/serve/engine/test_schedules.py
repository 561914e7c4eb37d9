"""Whatever comes, goes, shares and leaves early beside it, a request hears what it would hear alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopwm.core.exit_rules import ExitRule, Fixed, Gate
from loopwm.core.kv_cache import KVCache
from loopwm.records.template import OBS, Context
from loopwm.text.model.tokenizer import special_ids
from loopwm.text.world import World, WorldModel
from serve.engine.batch import RunningBatch
from serve.engine.forward import ModelRunner, prefill
from serve.engine.prefix_cache import BLOCK, PrefixCache
from serve.engine.requests import Event, Request
from serve.engine.sampling import SamplingParams, sample
from tests.fixtures.engine import run
from tests.fixtures.service import live_states

SCHEDULES = 100
DEPTHS: tuple[ExitRule, ...] = (Fixed(1), Fixed(3), Gate(0.3, 3))
ACTIONS = ("wait", "go to hall", "pick up pot")
GOALS = ("boil water", "find a tree")
Heard = list[tuple[int, int]]
"""Tokens and the loops behind them."""


class Reference:
    """Every request by itself: a plain state of one row, nothing shared, nothing kept. Answers are remembered."""

    def __init__(self, library: WorldModel) -> None:
        self._library, self._forward = library, ModelRunner(library.model)
        self._known: dict[Any, Heard] = {}

    def completion(self, request: Request) -> Heard:
        key = (request.prompt, request.params, request.depth)
        if key not in self._known:
            state = KVCache(1, torch.device("cpu"))
            if len(request.prompt) > 1:
                self._forward.decode(state, [request.prompt[:-1]], Fixed(request.depth.limit))
            first = self._forward.decode(state, [request.prompt[-1:]], request.depth)
            self._known[key] = self._generate(state, first, request)
        return self._known[key]

    def observation(self, goal: str, actions: tuple[str, ...], request: Request) -> Heard:
        key = (goal, actions, request.params.max_tokens, request.depth)
        if key not in self._known:
            pair = self._library.encode([Context(goal, "a room")] * 2, request.depth)  # two rows share nothing
            for action in actions:
                pair = self._library.advance(pair, [action] * 2)
            state = pair.state.select(torch.tensor([0]))
            self._known[key] = self._generate(
                state, self._forward.decode(state, [request.prompt], request.depth), request
            )
        return self._known[key]

    def _generate(self, state: KVCache, first: tuple[torch.Tensor, torch.Tensor], request: Request) -> Heard:
        (logits, loops), generator = first, request.params.generator()
        heard: Heard = []
        while True:
            token = sample(logits[0, -1], request.params, generator)
            heard.append((token, int(loops)))
            if len(heard) == request.params.max_tokens:
                return heard
            logits, loops = self._forward.decode(state, [[token]], request.depth)


class Asked:
    """A request in the batch, what it has heard, and where its reference comes from."""

    def __init__(self, request: Request, expected: Callable[[], Heard]) -> None:
        self.heard: Heard = []
        self.expected = expected
        self.request = replace(request, deliver=self)

    def __call__(self, event: Event) -> None:
        assert event.error is None
        assert event.token is not None
        self.heard.append((event.token, event.loops))


class Schedule:
    """A batch and worlds under seeded random requests."""

    def __init__(self, seed: int, library: WorldModel, reference: Reference) -> None:
        self.rng = random.Random(seed)
        self.library, self.reference = library, reference
        self.forward, self.cache = ModelRunner(library.model), PrefixCache(1 << 40)
        self.batch = RunningBatch(self.forward, end_token=-1)
        self.worlds: list[tuple[World, str, tuple[str, ...]]] = []
        self.asked: list[Asked] = []
        (self.obs,) = special_ids(library.tokenizer, (OBS,))

    def run(self) -> None:
        moves = (self.complete, self.complete, self.create, self.advance, self.fork, self.decode, self.decode)
        for _ in range(12):
            self.rng.choice((*moves, self.cancel, self.forget, self.batch.step, self.batch.step))()
        while len(self.batch):
            self.batch.step()
        for asked in self.asked:
            expected = asked.expected()
            assert asked.heard == (expected[: len(asked.heard)] if asked.request.cancelled else expected)

    def complete(self) -> None:
        """Some prompts of one depth, which may begin like each other and like former ones."""
        depth, numbers = self.rng.choice(DEPTHS), self.rng.sample(range(6), self.rng.randint(1, 3))
        for number in numbers:
            head = tuple(range(20, 20 + BLOCK * (number % 3)))
            max_tokens = 2 + number % 4
            sampled = {} if number % 2 else {"temperature": 1.0, "top_p": 0.9, "seed": number}
            params = SamplingParams(**sampled, max_tokens=max_tokens)
            prompt = (*head, 300 + number, *range(400, 400 + 3 * number))
            request = Request(prompt, params, depth)
            work = prefill(self.forward, self.cache, prompt[:-1], depth.limit)
            expected = lambda request=request: self.reference.completion(request)  # noqa: E731
            self._add(Asked(request, expected), run(work, self.rng.choice((5, 99))))

    def create(self) -> None:
        goal, depth = self.rng.choice(GOALS), self.rng.choice(DEPTHS)
        self.worlds.append((self.library.encode([Context(goal, "a room")], depth), goal, ()))

    def advance(self) -> None:
        if self.worlds:
            place = self.rng.randrange(len(self.worlds))
            world, goal, actions = self.worlds[place]
            action = self.rng.choice(ACTIONS)
            self.worlds[place] = self.library.advance(world, [action]), goal, (*actions, action)

    def fork(self) -> None:
        if self.worlds:
            self.worlds.append(self.rng.choice(self.worlds))

    def decode(self) -> None:
        """The observations of a world and of forks of it."""
        if not self.worlds:
            return
        world, goal, actions = self.rng.choice(self.worlds)
        request = Request((self.obs,), SamplingParams(max_tokens=self.rng.randint(1, 5)), world.depth, world.state)
        expected = lambda: self.reference.observation(goal, actions, request)  # noqa: E731
        for _ in range(self.rng.randint(1, 3)):
            self._add(Asked(request, expected), request.start.fork())

    def cancel(self) -> None:
        if self.asked:
            self.rng.choice(self.asked).request.cancelled = True

    def forget(self) -> None:
        self.cache.make_room(1 << 50)

    def _add(self, asked: Asked, state: KVCache) -> None:
        self.asked.append(asked)
        self.batch.add(asked.request, state)


@pytest.mark.slow
def test_every_random_schedule_answers_as_single_requests_do_and_leaves_no_state_behind(library):
    reference = Reference(library)
    left_early = shared = 0
    with torch.inference_mode():
        gc.collect()
        baseline = live_states()
        for seed in range(SCHEDULES):
            schedule = Schedule(seed, library, reference)
            schedule.run()
            left_early += sum(loops < asked.request.depth.limit for asked in schedule.asked for _, loops in asked.heard)
            shared += sum(asked.request.start is not None for asked in schedule.asked)
            if seed % 50 == 0:
                del schedule
                gc.collect()  # what was asked and its row hold each other here
                assert live_states() == baseline
    assert min(left_early, shared) > SCHEDULES / 10, (left_early, shared)
