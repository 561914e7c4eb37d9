"""Log-probabilities of prompts, over a real socket."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from serve.limits import Limits
from tests.fixtures.service import assert_alike

PROMPT = "<|goal|>boil water<|obs|>A “cup” stands here — 10 °C.<|end|><|act|>wait<|state|><|obs|>"


def echo(client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def full_pass(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities (L, V) by one plain forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.fixture
def ids(tokenizer) -> list[int]:
    return tokenizer(PROMPT)["input_ids"]


def test_scores_are_those_of_a_full_forward_pass(client, tiny_model, tokenizer, ids):
    (choice,) = echo(client)
    expected = full_pass(tiny_model, ids)
    chosen = choice["logprobs"]["token_logprobs"]
    assert chosen[0] is None
    torch.testing.assert_close(torch.tensor(chosen[1:]), expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] is None
    torch.testing.assert_close(torch.tensor([max(top.values()) for top in tops[1:]]), expected[:-1].max(-1).values)
    best = [tokenizer.decode([token]) for token in expected[:-1].argmax(-1).tolist()]
    assert [next(iter(top)) for top in tops[1:]] == best


def test_the_echo_is_the_prompt_and_offsets_point_into_it(client, ids):
    (choice,) = echo(client)
    found = choice["logprobs"]
    assert choice["text"] == "".join(found["tokens"]) == PROMPT
    assert len(found["tokens"]) == len(ids)
    starts = zip(found["text_offset"], found["tokens"], strict=True)
    assert all(PROMPT.startswith(token, start) for start, token in starts)


def test_one_more_token_is_the_greedy_one_with_its_score(client, tiny_model, ids):
    (choice,) = echo(client, max_tokens=1)
    expected = full_pass(tiny_model, ids)[-1]
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(expected.max().item(), abs=1e-5)
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    generated = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}).json()
    assert choice["text"] == PROMPT + generated["choices"][0]["text"]


def test_prompts_may_be_several_and_token_ids_and_longer_than_contexts(client, tokenizer, ids):
    alone = [echo(client, prompt=prompt)[0]["logprobs"] for prompt in (ids, ids[:7])]
    together = echo(client, prompt=[ids, ids[:7]])
    assert [choice["index"] for choice in together] == [0, 1]
    assert [choice["logprobs"] for choice in together] == alone
    assert alone[0] == echo(client)[0]["logprobs"]
    assert len(echo(client, prompt=ids * 70, logprobs=0)[0]["logprobs"]["tokens"]) == 70 * len(ids) > 2048


def test_without_top_scores_none_are_sent(client):
    assert echo(client, logprobs=0)[0]["logprobs"]["top_logprobs"] is None


def test_scoring_leaves_running_completions_as_they_are(client):
    request = {"model": "tiny", "prompt": "boil", "max_tokens": 60}
    alone = client.post("/v1/completions", json=request).json()["choices"][0]["text"]
    scores = echo(client)
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(client.post, "/v1/completions", json=request) for _ in range(3)]
        echoes = [pool.submit(echo, client) for _ in range(5)]
        assert_alike([echoed.result() for echoed in echoes], [scores] * 5)
    assert {text.result().json()["choices"][0]["text"] for text in texts} == {alone}


def test_scoring_counts_against_the_queue(serving, tiny_model):
    body = {"model": "tiny", "prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 0}
    long = {"model": "tiny", "prompt": "boil", "max_tokens": 4000, "stream": True}
    with (
        serving(tiny_model, Limits(max_batch=1, max_queue=0)) as client,
        client.stream("POST", "/v1/completions", json=long) as running,
    ):
        next(lines := running.iter_lines())
        response = client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert int(response.headers["Retry-After"]) >= 1
        lines.close()


def test_up_to_twenty_top_scores_are_the_best_of_a_full_pass(client, tiny_model, tokenizer, ids):
    tops = echo(client, logprobs=20)[0]["logprobs"]["top_logprobs"]
    values, best = full_pass(tiny_model, ids)[:-1].topk(20)
    for top, expected, tokens in zip(tops[1:], values, best.tolist(), strict=True):
        texts = [tokenizer.decode([token]) for token in tokens]
        assert set(top) == set(texts)
        assert top[texts[0]] == pytest.approx(expected[0].item(), abs=1e-5)


def test_an_echo_without_scores_is_the_prompt_before_the_text(client):
    body = {"model": "tiny", "prompt": [PROMPT, "boil"], "max_tokens": 9}
    plain = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    echoed = client.post("/v1/completions", json={**body, "echo": True}).json()["choices"]
    assert [choice["text"] for choice in echoed] == [PROMPT + plain[0], "boil" + plain[1]]
    (nothing,) = echo(client, logprobs=None)
    assert (nothing["text"], nothing["logprobs"], nothing["finish_reason"]) == (PROMPT, None, "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"echo": True, "logprobs": 1, "max_tokens": 2}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 1, "temperature": 1}, "temperature"),
        ({"echo": True, "logprobs": 1, "prompt": []}, "prompt"),
        ({"echo": True, "logprobs": 1, "prompt": [5] * 5000}, "prompt"),
    ],
)
def test_what_echo_does_not_offer_is_refused_by_name(client, fields, param):
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
