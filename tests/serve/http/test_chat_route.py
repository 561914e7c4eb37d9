"""Classes on the route of a streamed chat, from the socket to its first token: at most twelve.

Counting rule. A class of `serve` counts if one of its methods runs until the first text has been sent, on an instance
that is created for the request (it owns or wraps the request or a part of it), or that keeps such an instance.

Not counted: values, which have no methods of their own but those of dataclasses and of request bodies' parts; services
that take the request as an argument and keep nothing of it; modules and KV caches of the model; exceptions.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from serve.engine.forward import ModelRunner, PrefillResult
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Event, Scores
from serve.engine.sampling import SamplingParams
from serve.engine.scheduler import RetryEstimator
from serve.generation.metrics import Metrics
from serve.generation.prompts import Prompt, PromptReader
from serve.generation.rate_limits import RateLimiter
from serve.generation.service import ModelCard, Service
from serve.generation.streams import TextDelta, Token
from serve.http.bodies import Message
from serve.http.server import Server

VALUES = {Message, SamplingParams, Prompt, PrefillResult, Event, Scores, TextDelta, Token}
SERVICES = {
    *(Server, ModelRunner, ModelCard, PrefixCache, Metrics),
    *(RateLimiter, PromptReader, Service, RetryEstimator),
}
MOST = 12


def test_chat_route_has_at_most_twelve_classes(serving, tiny_model, chat):
    classes: set[type] = set()
    recording = threading.Event()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not recording.is_set():
            return
        owner = frame.f_locals.get("self")
        if type(owner).__module__.startswith("serve.") and not isinstance(owner, BaseException):
            classes.add(type(owner))

    threading.setprofile(watch)  # of threads that start from now on: the server's and the engine's
    try:
        with serving(tiny_model) as client:
            recording.set()
            with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as response:
                for line in response.iter_lines():
                    if '"content": "' in line and '"content": ""' not in line:
                        break
            recording.clear()
    finally:
        threading.setprofile(None)
    route = classes - VALUES - SERVICES
    assert {"Connection", "Middleware", "ChatBody", "Request", "TextStream"} <= {one.__name__ for one in route}
    assert len(route) <= MOST, sorted(one.__name__ for one in route)
