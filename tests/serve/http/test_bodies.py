"""Long bodies are refused by the same messages as short ones, and before they block the service."""

from __future__ import annotations

import json

import pytest

from serve.http.bodies import MAX_STEPS
from tests.serve.http.test_http import check_error
from tests.serve.worlds.test_worlds import GOAL, SEEN

MESSAGE = {"role": "user", "content": "wait and look around"}


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
def test_long_body_with_a_wrong_field_names_it(client, path, body, param):
    check_error(client.post(f"/v1/{path}", json={"model": "tiny", **body}), 400, param)


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "messages"), ("worlds", "history")])
def test_body_of_too_many_steps_is_refused(client, path, field):
    item = MESSAGE if field == "messages" else {"action": "wait", "observation": "ok"}
    body = {"model": "tiny", "goal": GOAL, "observation": SEEN} if path == "worlds" else {"model": "tiny"}
    check_error(client.post(f"/v1/{path}", json={**body, field: [item] * (MAX_STEPS + 1)}), 400, field, str(MAX_STEPS))


def test_long_body_with_unknown_fields_is_answered(client, chat):
    chat |= {"max_completion_tokens": 3, "invented": "x" * 20_000}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 3


def test_surrogate_pair_in_a_long_body_is_text(client):
    body = json.dumps({"model": "tiny", "prompt": "\U0001f6aa" + "x" * 20_000, "max_tokens": 1})
    assert "\\ud83d" in body
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    check_error(response, 400, "prompt", "limit")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\\uDC00 \xc3\xab"}',
        b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
        '{"model": "tiny", "prompt": "\\ud800"}'.encode("utf-16"),
        '{"model": "tiny", "prompt": "\\ud800"}'.encode("utf-32"),
    ],
)
def test_a_lone_surrogate_is_refused_in_every_encoding(client, body):
    for path in ("/v1/completions", "/tokenize"):
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        check_error(response, 400, None, "surrogate")
