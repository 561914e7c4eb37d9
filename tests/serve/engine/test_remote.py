"""A service over another server's tokens: the same answers, and one clear word where the server is not what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy

import httpx
import pytest

from loopwm.core.exit_rules import Fixed, Gate
from loopwm.records.errors import InputError
from loopwm.text.memory import Memory, TrainEpisode
from loopwm.text.world import WorldModel
from serve.limits import Limits
from serve.run import connect
from serve.start import main
from serve.worlds.steps import PrefixModel
from tests.fixtures import vllm
from tests.fixtures.models import random_model
from tests.fixtures.service import Serving, assert_alike
from tests.fixtures.vllm import FakeServer, FakeVllm
from tests.serve.http.test_http import events

WORLD = {"model": "tiny", "goal": "boil water", "observation": "This is the kitchen."}
TOKENS = 8


@pytest.fixture(scope="module")
def fake(fake_vllm: FakeServer, library: WorldModel) -> Iterator[FakeVllm]:
    with fake_vllm(library.model) as fake:
        yield fake


@pytest.fixture(scope="module")
def remote(serving: Serving, library: WorldModel, fake: FakeVllm) -> Iterator[httpx.Client]:
    with serving(library.model, server=fake.url) as client:
        yield client


def twin(library: WorldModel) -> PrefixModel:
    """A model whose weights may be dropped."""
    return PrefixModel(deepcopy(library.model), library.tokenizer)


def world_of(client: httpx.Client, **fields: object) -> str:
    response = client.post("/v1/worlds", json={**WORLD, **fields})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def step(client: httpx.Client, world: str, **fields: object) -> httpx.Response:
    return client.post(f"/v1/worlds/{world}/step", json={"actions": "wait", "max_tokens": TOKENS, **fields})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "<|goal|>boil water<|obs|>", "max_tokens": TOKENS, "logprobs": 2}),
        ("completions", {"prompt": ["<|obs|>", "<|goal|>boil"], "max_tokens": TOKENS, "return_token_ids": True}),
        ("completions", {"prompt": "<|goal|>boil water", "echo": True, "logprobs": 3, "max_tokens": 1}),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "boil water"},
                    {"role": "assistant", "content": "This is the kitchen."},
                    {"role": "user", "content": "wait"},
                ],
                "max_tokens": TOKENS,
                "logprobs": True,
            },
        ),
    ],
)
def test_remote_completions_are_those_of_the_own_engine(remote, worlds_client, path, body):
    replies = [client.post(f"/v1/{path}", json={"model": "tiny", **body}).json() for client in (remote, worlds_client)]
    for reply in replies:
        del reply["id"], reply["created"]
    assert_alike(*replies)


def test_remote_stream_comes_token_by_token(remote, fake):
    fake.gate.clear()
    body = {"model": "tiny", "prompt": "<|goal|>boil water", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    with remote.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line)
        fake.gate.set()
        rest = [line for line in lines if line]
    assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
    assert rest[-1] == "data: [DONE]"
    assert fake.bodies[-1]["min_tokens"] == TOKENS  # vLLM would only ignore an end token, not avoid it


def test_remote_samples_by_the_clients_seed(remote, fake):
    body = {"model": "tiny", "prompt": "<|goal|>", "max_tokens": TOKENS, "temperature": 1.5, "seed": 7, "n": 2}
    texts = [[choice["text"] for choice in remote.post("/v1/completions", json=body).json()["choices"]] for _ in "ab"]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert {sent["seed"] for sent in fake.bodies[-4:]} == {7, 8}


def test_remote_world_recalls_from_a_memory(serving, library, fake):
    steps = (("", "This is the kitchen."), ("wait", "You wait."))
    memory = Memory([TrainEpisode("scienceworld", "gold", "boil water", steps, 1)])
    answers = []
    for server in (None, fake.url):
        with serving(library.model, end_token=library._end, server=server, memory=memory) as client:
            (answer,) = step(client, world_of(client), logprobs=True).json()["steps"]
            answers.append({field: answer[field] for field in ("observation", "tokens", "finish_reason")})
    assert answers[0]["observation"] == "You wait."
    assert_alike(*answers)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/plan", {"candidates": [["wait"]]}, "candidates"),
        ("/actions", {"candidates": ["wait"], "decode": False}, "decode"),
        ("/step", {"actions": "wait", "monitor": True}, "monitor"),
        ("", {**WORLD, "depth": {"rule": "gate", "tau": 0.5, "limit": 2}}, "depth"),
        ("", {**WORLD, "depth": 1}, "depth"),
    ],
)
def test_remote_names_what_it_cannot_do(remote, path, body, field):
    world = f"/{world_of(remote)}" if path else ""
    refused = remote.post(f"/v1/worlds{world}{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "engine_unsupported")
    assert refused.json()["error"]["param"] == field


def test_remote_request_ends_at_its_deadline(remote, fake):
    world = world_of(remote)
    fake.gate.clear()
    late = remote.post(
        f"/v1/worlds/{world}/step", json={"actions": "wait", "max_tokens": TOKENS}, headers={"X-Request-Timeout": "0.5"}
    )
    fake.gate.set()
    assert late.status_code == 504
    assert remote.get(f"/v1/worlds/{world}").json()["imagined_steps"] == 0
    assert step(remote, world).status_code == 200


def test_remote_down_is_503_and_loses_no_world(serving, library, fake_vllm):
    with fake_vllm(library.model) as fake:
        port, service = int(fake.url.rpartition(":")[2]), serving(library.model, server=fake.url)
        client = service.__enter__()
        world = world_of(client)
        assert step(client, world).status_code == 200
    try:
        refused = step(client, world)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert fake.url in refused.json()["error"]["message"]
        assert client.get(f"/v1/worlds/{world}").json()["imagined_steps"] == 1
        assert client.get("/ready").status_code == 503
        with fake_vllm(library.model, port):
            assert step(client, world).json()["world"]["imagined_steps"] == 2
    finally:
        service.__exit__(None, None, None)


def test_remote_restarted_with_another_model_is_502(serving, library, fake_vllm, monkeypatch):
    monkeypatch.setattr("serve.engine.remote.SILENT_SECONDS", 0.0)
    with fake_vllm(library.model) as fake, serving(library.model, server=fake.url) as client:
        world = world_of(client)
        fake.model = other_model()
        refused = step(client, world)
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "engine_failed")
        assert "has other weights than --model" in refused.json()["error"]["message"]
        assert (client.get("/ready").status_code, client.get("/health").status_code) == (502, 200)
        fake.model = library.model
        assert step(client, world).status_code == 200
        fake.name = "renamed"
        assert step(client, world).status_code == 200


ABORTED = {"index": 0, "text": "", "logprobs": None, "finish_reason": "abort", "token_ids": []}


@pytest.mark.parametrize("rest", [[], [f"data: {json.dumps({'choices': [ABORTED]})}\n\n", "data: [DONE]\n\n"]])
def test_remote_answer_that_ends_early_is_503_and_changes_no_world(remote, monkeypatch, rest):
    chunks = vllm._chunks

    async def early(*arguments):
        yield await anext(chunks(*arguments))
        for line in rest:
            yield line

    world = world_of(remote)
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "_chunks", early)
        body = {"actions": "wait", "max_tokens": TOKENS}
        refused = remote.post(f"/v1/worlds/{world}/step", json=body, timeout=20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert "ended an answer early" in refused.json()["error"]["message"]
    assert step(remote, world).json()["world"]["imagined_steps"] == 1


def other_model():
    model = random_model(prediction_heads=True, monitor_head=True, exit_gate=True)
    model.model.embed_tokens.weight.data.mul_(1.5)
    return model


def refusal(url: str, model: PrefixModel, depth: object = Fixed(2)) -> str:
    with pytest.raises(InputError) as error:
        connect(url, model, depth, Limits())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_connect_names_what_differs(library, fake, fake_vllm):
    assert "http://127.0.0.1:1 does not answer" in refusal("http://127.0.0.1:1", twin(library))
    assert "other loops than 1 (--depth)" in refusal(fake.url, twin(library), Fixed(1))
    assert "must be a number of loops" in refusal(fake.url, twin(library), Gate(0.5, 2))
    assert "must have" not in refusal("nowhere", twin(library))
    with fake_vllm(other_model()) as other:
        assert "has other weights than --model" in refusal(other.url, twin(library))
    with fake_vllm(library.model, max_model_len=512) as short:
        assert "--max-model-len" in refusal(short.url, twin(library))
    with fake_vllm(library.model) as foreign:
        foreign.tokenizer = deepcopy(library.tokenizer)
        foreign.tokenizer.add_tokens(["kitchen"])
        assert "has another tokenizer" in refusal(foreign.url, twin(library))


def test_service_without_its_server_ends_with_status_2(checkpoint, capsys):
    assert main(["--model", str(checkpoint), "--engine", "http://127.0.0.1:1", "--port", "0"]) == 2
    assert "--engine: http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_service_of_another_kind_is_named(library, worlds_client):
    assert "must answer as vLLM's server does" in refusal(str(worlds_client.base_url), twin(library))


def test_streamed_step_over_a_server_ends_as_a_plain_one(remote):
    plain = step(remote, world_of(remote)).json()["steps"]
    *_, whole = events(remote, f"/v1/worlds/{world_of(remote)}/step", {"actions": "wait", "max_tokens": TOKENS})
    assert whole["steps"] == plain
