"""What tests of the engine run it with, at the level of token ids."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopwm.core import Fixed
from loopwm.text.model.tokenizer import load_tokenizer
from serve.engine.batch import RunningBatch
from serve.engine.forward import ForwardGenerator, ModelRunner, run_batch
from serve.engine.prefill import prefill
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Event, Request

NEVER = -1
DEPTH = Fixed(2)


class Collector:
    """Everything an engine delivers for one request."""

    def __init__(self, request: Request) -> None:
        self.tokens: list[int] = []
        self.loops: list[int] = []
        self.last = Event()
        self.over = threading.Event()
        self.request = replace(request, deliver=self)

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


def run(steps: ForwardGenerator[Any], most: int = 1 << 20) -> Any:
    """What work comes to, its passes cut to `most` tokens."""
    try:
        asked = next(steps)
        while True:
            (result,) = run_batch([asked.split(most)])
            asked = steps.throw(result) if isinstance(result, Exception) else steps.send(result)
    except StopIteration as end:
        return end.value


class Model:
    """A running batch, and prompts that are run for it."""

    def __init__(self, model: Any, end_token: int = NEVER, most: int = 1 << 20) -> None:
        self.forward, self.cache, self.most = ModelRunner(model), PrefixCache(1 << 40), most
        self.batch = RunningBatch(self.forward, end_token)

    def add(self, *collectors: Collector) -> None:
        for collector in collectors:
            request = collector.request
            work = prefill(self.forward, self.cache, request.prompt[:-1], request.depth.limit)
            self.batch.add(collector.request, run(work, self.most))

    def finish(self) -> None:
        while len(self.batch):
            self.batch.step()


def alone(model: Any, request: Request, end_token: int = NEVER) -> Collector:
    collector, made = Collector(request), Model(model, end_token)
    made.add(collector)
    made.finish()
    return collector


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows times columns of every pass from now on."""
    sizes: list[int] = []
    forward = type(model.model).forward

    def counting(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tokens.numel())
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", counting)
    return sizes


def fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")
