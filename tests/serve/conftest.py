"""The real app on a real socket, with a tiny random model."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from loopwm.core import Fixed, KVCache
from loopwm.core.kv_cache import SLACK
from loopwm.text.world import WorldModel
from serve.engine.engine import Engine, Limits
from serve.engine.requests import Request
from serve.engine.sampling import SamplingParams
from serve.generation.prompts import PromptReader
from serve.generation.rate_limits import RateLimiter
from serve.generation.service import ModelCard, Service
from serve.http.app import create_app
from serve.http.auth import KeyRing
from serve.http.server import Server
from serve.start import listen
from serve.worlds.sessions import Sessions
from serve.worlds.sqlite import WorldFile
from serve.worlds.store import WorldLimits, WorldStore
from tests.serve.in_the_engine import DEPTH, random_prompt

NEVER = -1
"""An end token that is never generated: completions are as long as max_tokens says."""

Serving = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="session")
def serving(tokenizer) -> Serving:
    """Runs a service for a model; the client's base address is its."""

    @contextmanager
    def start(
        model: Any,
        limits: Limits | None = None,
        end_token: int = NEVER,
        worlds: WorldLimits | None = None,
        keys: KeyRing | None = None,
        grace: float = 5,
        file: WorldFile | None = None,
        hosts: Collection[str] = (),
        log_json: bool = False,
    ) -> Iterator[httpx.Client]:
        with listen("127.0.0.1", 0) as listener, Engine(model, end_token, limits) as engine:
            card = ModelCard("tiny", 0, model.config.max_position_embeddings, Fixed(model.config.default_depth))
            rate_limiter = RateLimiter(keys and keys.quotas)
            service = Service(
                card,
                engine,
                tokenizer,
                PromptReader(tokenizer, model.config.slots, context_tokens=model.config.context_tokens),
                rate_limiter,
            )
            store = WorldStore(worlds or WorldLimits(), file=file, rate_limiter=rate_limiter)
            sessions = Sessions(service, WorldModel(model, tokenizer), store)
            server = Server(create_app(sessions, keys, hosts, log_json), service, grace)
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            port = listener.getsockname()[1]
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                    yield client
            finally:  # a server that goes on would keep the process from its end
                server.should_exit = True
                thread.join()
                store.close()

    return start


@pytest.fixture(scope="session")
def client(serving: Serving, tiny_model) -> Iterator[httpx.Client]:
    with serving(tiny_model) as client:
        yield client


@pytest.fixture
def chat() -> dict[str, Any]:
    """A chat request of a text world: goal, first observation and two actions."""
    messages = [
        {"role": "system", "content": "Your task is to boil water."},
        {"role": "assistant", "content": "This room is called the kitchen."},
        {"role": "user", "content": "open cupboard"},
        {"role": "user", "content": "look in cupboard"},
    ]
    return {"model": "tiny", "messages": messages, "max_tokens": 12}


def live_states() -> int:
    """States that somebody holds, or nobody but the garbage collector has to find out."""
    return sum(issubclass(type(thing), KVCache) for thing in gc.get_objects())


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def assert_alike(one: Any, other: Any) -> None:
    """Equal but for the last bits of numbers, which depend on who decodes beside whom."""
    assert type(one) is type(other)
    if isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-3)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_alike(list(one.values()), list(other.values()))
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    else:
        assert one == other


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy and sampled ones of different lengths; two share their first 20 tokens."""
    shared = random_prompt(20, 9)
    return [
        Request(shared + random_prompt(5, 1), SamplingParams(max_tokens=9), DEPTH),
        Request(shared + random_prompt(12, 2), SamplingParams(1.0, 0.9, 3, max_tokens=14), DEPTH),
        Request(random_prompt(30, 3), SamplingParams(0.7, 1.0, 4, max_tokens=5), DEPTH),
        Request(random_prompt(3, 4), SamplingParams(max_tokens=SLACK + 9), DEPTH),
        Request(random_prompt(3, 4), SamplingParams(1.5, 0.95, 5, max_tokens=12), DEPTH),
    ]
