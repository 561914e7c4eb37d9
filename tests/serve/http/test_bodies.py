"""Long bodies: bounded before they are parsed, read beside the event loop, refused as short ones are."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from serve.http import openai, routes
from serve.http.bodies import ChatBody
from serve.http.routes import MAX_ITEMS, MAX_OBJECTS, SHORT, CancellableRoute, ParsedRequest
from tests.serve.http.test_http import check_error
from tests.serve.worlds.test_worlds import GOAL, SEEN

MESSAGE = {"role": "user", "content": "wait and look around"}


def chats() -> CancellableRoute:
    (route,) = [r for r in openai.router.routes if r.path.endswith("/chat/completions")]
    assert isinstance(route, CancellableRoute)
    return route


async def read(body: bytes) -> ChatBody:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    chat: ChatBody = await ParsedRequest({"type": "http", "headers": []}, receive, chats()._check).json()
    return chat


def test_a_long_body_is_read_in_a_thread_that_gives_way_at_every_object():
    """What is no Python, parser and pydantic, keeps the interpreter until it calls what is."""
    calls: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and threading.current_thread() is not threading.main_thread():
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    threading.setprofile(watch)  # of threads that begin from now on
    try:
        chat = asyncio.run(read(json.dumps({"model": "tiny", "messages": [MESSAGE] * 1000}).encode()))
    finally:
        threading.setprofile(None)
    assert len(chat.messages) == 1000
    assert calls["routes.py:_pause"] == calls["bodies.py:_pause"] == 1001


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [MESSAGE] * 999 + [{"role": "user"}]}, "messages[999].content"),
        ("chat/completions", {"messages": [{**MESSAGE, "content": 7}] * 999}, "messages[0].content"),
        ("completions", {"prompt": [None] * 9999}, "prompt"),
        ("completions", {"prompt": "x" * 20_000, "n": 0}, "n"),
        ("worlds", {"goal": GOAL, "observation": SEEN, "history": [{"action": "x"}] * 999}, "history[0].observation"),
    ],
)
def test_a_long_body_is_refused_as_a_short_one(client, monkeypatch, path, body, param):
    content = json.dumps({"model": "tiny", **body})
    assert len(content) > SHORT

    def post() -> Any:
        return client.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})

    long = post()
    check_error(long, 400, param)
    monkeypatch.setattr(routes, "SHORT", len(content))
    assert post().json() == long.json()


def test_a_long_body_is_taken_as_a_short_one(client, chat, monkeypatch):
    chat |= {"max_completion_tokens": 3, "invented": "x" * SHORT}
    long = client.post("/v1/chat/completions", json=chat).json()
    monkeypatch.setattr(routes, "SHORT", 10 * SHORT)
    short = client.post("/v1/chat/completions", json=chat).json()
    assert (long["choices"], long["usage"]) == (short["choices"], short["usage"])
    assert long["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("junk", "told"), [([{}] * MAX_OBJECTS, f"{MAX_OBJECTS} objects"), ([0] * MAX_ITEMS, f"{MAX_ITEMS} values")]
)
def test_a_body_of_too_many_things_is_refused_before_it_is_parsed(client, monkeypatch, junk, told):
    monkeypatch.setattr(routes.json, "loads", lambda *_, **__: 1 / 0)
    refused = client.post("/v1/completions", content=json.dumps({"model": "tiny", "prompt": "x", "junk": junk}),
                          headers={"Content-Type": "application/json"})  # fmt: skip
    monkeypatch.undo()
    check_error(refused, 413, None, told)
