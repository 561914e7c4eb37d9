"""Any mix of valid, invalid and poisonous requests: everybody hears what they would hear alone, and in time."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from serve.engine import engine as engine_module
from serve.engine.batch import RunningBatch
from serve.engine.engine import Engine
from serve.engine.forward import ForwardBatch, run_batch
from serve.engine.requests import WorkItem
from serve.limits import Limits
from serve.worlds.sessions import MAX_ACTIONS
from tests.fixtures import service
from tests.fixtures.models import random_model
from tests.fixtures.service import assert_alike, wait_until
from tests.serve.http.test_http import post_without_reading

POISON, NO_NUMBER = "¿", "§"
"""The model fails at a pass with the last token of the first. Behind that of the second nothing is a number."""

BUDGET = 32
"""Tokens of others between two tokens of those who decode."""

LONGEST_STEP = 16
"""Tokens of the longest action of a script, a pass that is not cut."""

WORLD = "WORLD"
JSON = {"Content-Type": "application/json"}
Call = tuple[str, str]
"""Path and body, as JSON. Both may name the world that the script began with."""


@dataclass(frozen=True)
class Script:
    """What one client asks for, one call after another. The first may create a world."""

    calls: tuple[Call, ...]


class Player:
    """A client with its script. told: statuses and answers, without what no two of them share."""

    def __init__(self, client: httpx.Client, script: Script) -> None:
        self.told: list[Any] = []
        self._client, self._calls, self._world = client, list(script.calls), WORLD

    def play(self) -> bool:
        """The next call; whether there was one."""
        if not self._calls:
            return False
        path, body = (part.replace(WORLD, self._world) for part in self._calls.pop(0))
        response = self._client.post(path, content=body, headers=JSON)
        self.told.append([response.status_code, _comparable(_read(response.text.replace(self._world, WORLD)))])
        if path == "/v1/worlds" and response.status_code == 201:
            self._world = response.json()["id"]
        return True

    def release(self) -> None:
        if self._world != WORLD:
            assert self._client.delete(f"/v1/worlds/{self._world}").status_code == 200


def _read(text: str) -> Any:
    """JSON, or the events of a stream."""
    if not text.startswith("data: "):
        return json.loads(text)
    events = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def _comparable(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _comparable(value) for key, value in told.items() if key not in ("id", "created")}
    return [_comparable(each) for each in told] if isinstance(told, list) else told


class Watch:
    """Over an engine, which it can hold until a crowd waits for it, and over a model, which it poisons.

    failed: passes that failed with innocent rows among theirs, by kind; gaps: tokens of others between two tokens.
    """

    engine: Engine

    def __init__(self, poison: int, no_number: int) -> None:
        self.failed: Counter[str] = Counter()
        self.gaps: list[int] = []
        self._poison, self._no_number = poison, no_number
        self._kind, self._beside = "", 0

    def install(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        forward, step = model.model.forward, RunningBatch.step

        def start(*args: Any) -> Engine:
            self.engine = Engine(*args)
            return self.engine

        def take(passes: Sequence[ForwardBatch]) -> list[Any]:
            self._kind = type(passes[0]).__name__
            return run_batch(passes)

        def decode(batch: RunningBatch) -> None:
            self.gaps.append(self._beside)
            self._kind, self._beside = "decode", 0
            step(batch)

        def poisoned(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._check(tokens)
            out = forward(tokens, *args, **kwargs)
            out.last_hidden_state[(tokens == self._no_number).any(1)] = torch.nan
            return out

        patch.setattr(service, "Engine", start)
        patch.setattr(engine_module, "run_batch", take)
        patch.setattr(RunningBatch, "step", decode)
        patch.setattr(model.model, "forward", poisoned)

    def _check(self, tokens: torch.Tensor) -> None:
        """Of a pass, (B, L)."""
        if self._kind != "decode":
            self._beside += int((tokens != 0).sum())
        guilty = (tokens == self._poison).any(1)
        if guilty.any():
            self.failed[self._kind] += not guilty.all()
            raise RuntimeError("poison")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is begun meanwhile."""
        come = threading.Event()

        def wait() -> Iterator[ForwardBatch]:
            wait_until(come.is_set)
            yield from ()

        self.engine.add(WorkItem(steps=wait()))
        try:
            yield
        finally:
            come.set()

    def gather(self, asked: Sequence[Future[bool]]) -> None:
        """Until each of these is over or in the queue, behind what holds it up."""
        wait_until(lambda: sum(not one.done() for one in asked) < self.engine.load[1])


@pytest.fixture(scope="module")
def watch(tokenizer) -> Watch:
    return Watch(*(tokenizer(text)["input_ids"][-1] for text in (POISON, NO_NUMBER)))


@pytest.fixture(scope="module")
def client(serving, watch) -> Iterator[httpx.Client]:
    model = random_model(prediction_heads=True, monitor_head=True, exit_gate=True)
    with pytest.MonkeyPatch.context() as patch:
        watch.install(model, patch)
        with serving(model, Limits(prefill_tokens_with_decodes=BUDGET, max_num_batched_tokens=BUDGET)) as client:
            yield client


@pytest.fixture(scope="module")
def alone(client) -> Any:
    @cache
    def told(script: Script) -> list[Any]:
        player = Player(client, script)
        while player.play():
            pass
        player.release()
        return player.told

    return told


# What may be asked for. Texts are the innocent ones or those that do harm.

CLEAN = ("boil water", "find a tree", "zoë 水\n", "", " ")
LONG = "boil a pot of water " * 80
FOUL = (f"find {POISON}", f"find {POISON}", f"{POISON} a tree", f"boil {NO_NUMBER}")
BAD = st.sampled_from([-1, 1e300, "x", [], {}, 2**63])
BASE = {"model": "tiny", "max_tokens": 6, "seed": 7}
SAMPLED = {
    "temperature": st.sampled_from([0, 1e-300, 0.7, 2]),
    "top_p": st.sampled_from([1, 1e-46, 0.5]),
    "max_tokens": st.sampled_from([1, 5, 9]),
    "stream": st.booleans(),
}


def fields(**each: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Valid values of some of these fields, and sometimes one that may not be."""
    valid = st.fixed_dictionaries({}, optional=each)
    wrong = st.dictionaries(st.sampled_from(sorted(each)), BAD, min_size=1, max_size=1)
    return st.one_of(valid, valid, st.builds(lambda some, bad: some | bad, valid, wrong))


GENERATION = fields(
    **SAMPLED,
    min_p=st.sampled_from([0, 0.1, 1]),
    top_k=st.sampled_from([-1, 1, 10**9]),
    n=st.sampled_from([1, 2]),
    stop=st.sampled_from(["e", "", ["a", "o"]]),
    logprobs=st.sampled_from([0, 3]),
    depth=st.sampled_from([2, {"rule": "gate", "tau": 0.5, "limit": 3}]),
)
STEP_FIELDS = fields(**SAMPLED, decode=st.sampled_from(["last", "each", "none"]), monitor=st.booleans())


def call(path: str, *parts: dict[str, Any]) -> Call:
    return path, json.dumps({key: value for part in parts for key, value in part.items()})


def chat(goal: str, seen: str, action: str, asked: dict[str, Any]) -> Call:
    spoken = zip(("system", "assistant", "user"), (goal, seen, action), strict=True)
    messages = [{"role": role, "content": content} for role, content in spoken]
    return call("/v1/chat/completions", BASE, {"messages": messages}, asked)


def batch(steps: dict[str, Any]) -> Call:
    requests = [{"op": "step", "world": WORLD, **steps}, {"op": "delete", "world": "none"}]
    return call("/v1/worlds:batch", {"requests": requests})


def creating(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Call]:
    return st.builds(lambda g, o: call("/v1/worlds", {"model": "tiny", "goal": g, "observation": o}), texts, texts)


def prompting(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Call]:
    """Calls without a world, at least before."""
    prompts = st.one_of(texts, texts, st.lists(texts, max_size=3), st.just([1, 10**9]), st.just([None]))
    return st.one_of(
        st.builds(lambda prompt, asked: call("/v1/completions", BASE, {"prompt": prompt}, asked), prompts, GENERATION),
        st.builds(chat, texts, texts, texts, GENERATION),
        st.builds(lambda text: call("/tokenize", {"prompt": text}), texts),
        st.one_of(creating(texts), st.just(call("/v1/worlds/none/step", {"actions": "wait"}))),
    )


def moving(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Call]:
    """Calls in a world."""
    actions = st.one_of(texts, st.lists(texts, min_size=1, max_size=3), st.just(["wait"] * (MAX_ACTIONS + 1)))
    steps = st.builds(lambda some, asked: {"max_tokens": 6, "seed": 7, "actions": some} | asked, actions, STEP_FIELDS)
    plans = st.lists(st.lists(texts, max_size=2), max_size=3)
    return st.one_of(
        steps.map(lambda body: call(f"/v1/worlds/{WORLD}/step", body)),
        steps.map(lambda body: call(f"/v1/worlds/{WORLD}/step", body)),
        steps.map(batch),
        st.builds(lambda a, o: call(f"/v1/worlds/{WORLD}/observe", {"action": a, "observation": o}), texts, texts),
        plans.map(lambda some: call(f"/v1/worlds/{WORLD}/plan", {"candidates": some, "max_tokens": 4})),
    )


def scripts(words: Sequence[str]) -> st.SearchStrategy[Script]:
    texts = st.sampled_from(words)
    born = creating(st.sampled_from((*CLEAN, LONG)))
    lives = st.builds(lambda first, others: (first, *others), born, st.lists(moving(texts), min_size=1, max_size=2))
    return st.one_of(st.tuples(prompting(st.sampled_from((*words, LONG)))), lives).map(Script)


def asking(prompt: str) -> Script:
    return Script((call("/v1/completions", BASE, {"prompt": prompt}),))


def stepping(action: str) -> Script:
    born = call("/v1/worlds", {"model": "tiny", "goal": "boil water", "observation": "a room"})
    return Script((born, call(f"/v1/worlds/{WORLD}/step", {"actions": action, "max_tokens": 4})))


@settings(
    max_examples=25, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@example(
    innocent=[asking("boil water"), asking("find a tree"), stepping("boil water"), stepping("find a tree")],
    suspicious=[asking(f"{POISON} a tree"), asking(f"find {POISON}"), stepping(f"find {POISON}")],
    leaving=[],
)
@given(
    innocent=st.lists(scripts(CLEAN), min_size=2, max_size=4),
    suspicious=st.lists(scripts(FOUL), min_size=1, max_size=2),
    leaving=st.lists(prompting(st.sampled_from(FOUL)), max_size=1),
)
def play_mixes(client, watch, alone, statuses, innocent, suspicious, leaving):
    some = [*innocent, *suspicious]
    expected = [alone(script) for script in some]
    assert wait_until(lambda: watch.engine.load == (0, 0))
    watch.engine.cache.make_room(watch.engine.cache.max_bytes)  # else what was asked alone would take no passes now
    players = [Player(client, script) for script in some]
    with ThreadPoolExecutor(len(some)) as pool:
        going = True
        while going:
            with watch.held():
                gone = [post_without_reading(client, path, json.loads(body)) for path, body in leaving]
                played = [pool.submit(player.play) for player in players]
                watch.gather(played)
            for connection in gone:
                connection.close()
            going = bool(sum(one.result() for one in played))
    for script, player, answer in zip(some, players, expected, strict=True):
        player.release()
        statuses.update(status for status, _ in player.told)
        try:
            assert_alike(player.told, answer)
        except AssertionError as error:
            raise AssertionError(f"{script}\nbeside others: {player.told}\nalone: {answer}") from error


@pytest.mark.slow
def test_in_any_mix_everybody_hears_what_they_would_hear_alone(client, watch, alone):
    statuses: set[int] = set()
    play_mixes(client=client, watch=watch, alone=alone, statuses=statuses)
    assert {200, 201, 400, 404, 500} <= statuses
    assert min(watch.failed[kind] for kind in ("PrefillChunk", "Advance", "decode")) >= 1, watch.failed
    assert max(watch.gaps) <= 2 * (BUDGET + LONGEST_STEP), "who fails is repeated once"
    assert wait_until(lambda: client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0})
