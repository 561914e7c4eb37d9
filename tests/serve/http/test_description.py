"""The description of the API says what every route answers, and real answers are so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import routing
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from serve.http import openai, worlds
from serve.http.schemas import Health, Version
from tests.serve.http.test_http import events
from tests.serve.worlds.test_worlds import GOAL, SEEN, create

CHAT = "/v1/chat/completions"
PROMPT = {"model": "tiny", "prompt": "boil", "max_tokens": 3}
SCORED = {"temperature": 1, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}


def answer_of(method: str, path: str) -> Any:
    """The model that a route says it answers with."""
    for router in (openai.router, worlds.router):
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_format == path and method in route.methods:
                return route.response_model or route.responses[200]["model"]
    return {"/health": Health, "/version": Version}[path]


def fits(method: str, path: str, response: httpx.Response) -> Any:
    """The answer, which has all that it should have and nothing else."""
    assert response.is_success, response.text
    TypeAdapter(answer_of(method, path)).validate_json(response.content, strict=True, extra="forbid")
    return response.json()


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/worlds"])
def test_what_there_is_to_get(worlds_client, path):
    fits("GET", path, worlds_client.get(path))


def test_models_and_tokens(worlds_client):
    fits("GET", "/v1/models/{name}", worlds_client.get("/v1/models/tiny"))
    for fields in ({}, {"return_token_strs": True}):
        told = fits("POST", "/tokenize", worlds_client.post("/tokenize", json={"prompt": "boil water", **fields}))
    fits("POST", "/detokenize", worlds_client.post("/detokenize", json={"tokens": told["tokens"]}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["boil", "look"], "n": 2, "temperature": 1, "logprobs": 2, "return_token_ids": True, "echo": False},
        {"logprobs": 0},
        {"echo": True},
        {"echo": True, "logprobs": 2, "max_tokens": 1},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
    ],
)
def test_completions(worlds_client, fields):
    fits("POST", "/v1/completions", worlds_client.post("/v1/completions", json={**PROMPT, **fields}))


@pytest.mark.parametrize("fields", [{}, SCORED, {"max_tokens": 400}])
def test_chats(worlds_client, chat, fields):
    fits("POST", CHAT, worlds_client.post(CHAT, json={**chat, **fields}))


def test_responses(worlds_client, chat):
    body = {"model": "tiny", "input": chat["messages"], "max_output_tokens": 3}
    fits("POST", "/v1/responses", worlds_client.post("/v1/responses", json=body))


@pytest.mark.parametrize(
    "fields",
    [{}, {"actions": ["a", "b"], "decode": "each", "logprobs": True, "monitor": True}, {"decode": "none"}],
)  # fmt: skip
def test_steps_of_worlds(worlds_client, fields):
    body = {"actions": "wait", "max_tokens": 5, **fields}
    path = f"/v1/worlds/{create(worlds_client)}/step"
    fits("POST", "/v1/worlds/{name}/step", worlds_client.post(path, json=body))


def test_worlds(worlds_client):
    body = {"model": "tiny", "goal": GOAL, "observation": SEEN, "history": [{"action": "wait", "observation": "x"}]}
    name = fits("POST", "/v1/worlds", worlds_client.post("/v1/worlds", json=body))["id"]
    world = f"/v1/worlds/{name}"
    seen = {"action": "wait", "observation": "Nothing."}
    fits("GET", "/v1/worlds/{name}", worlds_client.get(world))
    fits("GET", "/v1/worlds/{name}/export", worlds_client.get(f"{world}/export"))
    fits("POST", "/v1/worlds/{name}/observe", worlds_client.post(f"{world}/observe", json=seen))
    fits("POST", "/v1/worlds/{name}/fork", worlds_client.post(f"{world}/fork"))
    for decode in (True, False):
        plan = {"candidates": [["wait"], ["look", "wait"]], "decode": decode, "max_tokens": 5}
        fits("POST", "/v1/worlds/{name}/plan", worlds_client.post(f"{world}/plan", json=plan))
    tried = {"candidates": ["wait", "look"], "max_tokens": 5}
    fits("POST", "/v1/worlds/{name}/actions", worlds_client.post(f"{world}/actions", json=tried))
    some = [{"op": "create", **body}, {"op": "step", "world": name, "actions": "x", "max_tokens": 3},
            {"op": "observe", "world": "none", **seen}, {"op": "delete", "world": create(worlds_client)}]  # fmt: skip
    told = fits("POST", "/v1/worlds:batch", worlds_client.post("/v1/worlds:batch", json={"requests": some}))
    assert [answer["status"] for answer in told["data"]] == [201, 200, 404, 200]
    fits("DELETE", "/v1/worlds/{name}", worlds_client.delete(world))


def test_every_success_is_described_and_so_are_events(worlds_client):
    told = worlds_client.get("/openapi.json").json()
    streamed = []
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            (success,) = [told for status, told in operation["responses"].items() if status.startswith("2")]
            kinds = success["content"]
            assert all("$ref" in kind["schema"] or kind["schema"]["type"] == "string" for kind in kinds.values()), path
            streamed += [(method, path)] if "text/event-stream" in kinds else []
    paths = ("/v1/completions", CHAT, "/v1/responses", "/v1/worlds/{name}/step", "/v1/games")
    assert streamed == [("post", path) for path in paths]


def test_what_is_said_to_come_as_events_does(worlds_client, chat):
    assert events(worlds_client, "/v1/completions", PROMPT)
    assert events(worlds_client, CHAT, chat)


def test_large_answers_go_out_as_they_were_made(worlds_client, monkeypatch):
    """To check them once more would hold up all others."""
    name = create(worlds_client)
    monkeypatch.setattr(routing, "serialize_response", lambda **_: 1 / 0)
    asked = {"op": "step", "world": name, "actions": "wait", "max_tokens": 3}
    answers = [
        worlds_client.post("/v1/completions", json=PROMPT),
        worlds_client.post(f"/v1/worlds/{name}/step", json={"actions": "wait", "max_tokens": 3}),
        worlds_client.post("/v1/worlds:batch", json={"requests": [asked]}),
        worlds_client.get(f"/v1/worlds/{name}/export"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert worlds_client.get("/v1/models").status_code == 500  # which shows that it would be seen
