"""What clients may ask of generated tokens, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve.engine.sampling import GREEDY_BELOW, SamplingParams, sample
from tests.fixtures.models import random_model
from tests.serve.http.test_http import completion, events, text_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WARM = {"temperature": 1.5, "seed": 3}


def choices_of(client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_choices_draw_by_seed_and_number_alone(client, chat):
    alone = [text_of(client, max_tokens=15, temperature=1.5, seed=3 + i) for i in range(3)]
    assert len(set(alone)) == 3
    found = completion(client, prompt=["x", "<|goal|>boil water"], n=3, max_tokens=15, **WARM)["choices"]
    assert [choice["index"] for choice in found] == list(range(6))
    assert [choice["text"] for choice in found[3:]] == alone
    assert len(choices_of(client, CHAT, {**chat, **WARM, "n": 4})) == 4


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["e"]}, {"logprobs": 2}, {"return_token_ids": True}])
def test_streamed_choices_are_the_plain_ones(client, fields):
    body = {"model": "tiny", "prompt": ["boil", "open door"], "n": 3, "max_tokens": 30, **WARM, **fields}
    plain = choices_of(client, COMPLETIONS, body)
    joined = [{"text": "", "tokens": [], "scores": [], "finish": None} for _ in plain]
    for event in events(client, COMPLETIONS, body):
        (choice,) = event["choices"]
        into = joined[choice["index"]]
        assert into["finish"] is None, "nothing comes after the finish reason"
        into["text"] += choice["text"]
        into["tokens"] += choice.get("token_ids", [])
        into["scores"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        into["finish"] = choice["finish_reason"]
    for choice, into in zip(plain, joined, strict=True):
        assert into["text"] == choice["text"]
        assert into["tokens"] == choice.get("token_ids", [])
        assert into["scores"] == pytest.approx((choice["logprobs"] or {}).get("token_logprobs", []), abs=1e-4)
        assert into["finish"] == choice["finish_reason"]


def test_several_streamed_choices_come_side_by_side(client):
    body = {"model": "tiny", "prompt": "boil", "n": 2, "max_tokens": 60, **WARM}
    order = [event["choices"][0]["index"] for event in events(client, COMPLETIONS, body)]
    assert 1 in order[: order.count(0)], "the second choice waited for the first to end"


def test_scores_of_generated_tokens_are_those_of_a_full_pass(client, tiny_model, tokenizer):
    (choice,) = completion(client, max_tokens=8, logprobs=5, return_token_ids=True, **WARM)["choices"]
    prompt, made, told = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]
    assert prompt == tokenizer("<|goal|>boil water")["input_ids"]
    with torch.inference_mode():
        logits = tiny_model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    chosen = expected.gather(-1, torch.tensor(made)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told["token_logprobs"]), chosen, atol=1e-4, rtol=0)
    assert told["tokens"] == [tokenizer.decode([token]) for token in made]
    for top, values in zip(told["top_logprobs"], expected.topk(5).values, strict=True):
        assert max(top.values()) == pytest.approx(values[0].item(), abs=1e-4)
    assert told["text_offset"][0] == 0
    assert told["text_offset"] == sorted(told["text_offset"])


def test_a_chat_tells_scores_in_its_own_shape_with_bytes(client, chat, tokenizer):
    (choice,) = choices_of(client, CHAT, {**chat, **WARM, "logprobs": True, "top_logprobs": 3})
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == chat["max_tokens"]
    heard = bytes(byte for token in tokens if not token["token"].startswith("<|") for byte in token["bytes"])
    assert heard.decode(errors="replace") == choice["message"]["content"]
    for token in tokens:
        assert [top["logprob"] for top in token["top_logprobs"]] == sorted(
            (top["logprob"] for top in token["top_logprobs"]), reverse=True
        )
        assert len(token["top_logprobs"]) == 3
    (plain,) = choices_of(client, CHAT, {**chat, **WARM})
    assert (plain["logprobs"], plain["message"]) == (None, choice["message"])


@pytest.fixture(scope="module")
def end_token(client) -> int:
    """A token that the greedy text comes to: where it is the end, texts end early."""
    return completion(client, max_tokens=20, return_token_ids=True)["choices"][0]["token_ids"][4]


def test_the_end_waits_for_min_tokens_and_never_comes_with_ignore_eos(serving, tiny_model, end_token):
    with serving(tiny_model, end_token=end_token) as client:

        def tokens(**fields: Any) -> list[int]:
            return completion(client, max_tokens=20, return_token_ids=True, **fields)["choices"][0]["token_ids"]

        early = tokens()
        assert len(early) <= 4
        later = tokens(min_tokens=len(early) + 1)
        assert len(later) > len(early)
        assert later[: len(early)] == early
        endless = tokens(ignore_eos=True)
        assert len(endless) == 20
        assert end_token not in endless


def test_stop_strings_wait_for_min_tokens(client):
    free = text_of(client, max_tokens=30)
    assert text_of(client, max_tokens=30, stop=free[:2]) == ""
    assert text_of(client, max_tokens=30, stop=free[:2], min_tokens=30) == free


def test_usage_grows_along_a_stream_that_asks_for_it(client, chat):
    body = {**chat, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    usages = [event["usage"] for event in events(client, CHAT, body)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], usages[0]["loops"]) == (0, None)
    assert usages[-1] == client.post(CHAT, json=chat).json()["usage"]


def test_depth_is_the_callers_and_usage_tells_the_loops(serving, chat):
    with serving(random_model(exit_gate=True)) as client:
        for depth in (1, 2):
            assert completion(client, depth=depth, max_tokens=9)["usage"]["loops"] == depth
        rule = {"rule": "gate", "tau": 0.3, "limit": 3}
        assert 1 <= client.post(CHAT, json={**chat, "depth": rule}).json()["usage"]["loops"] < 3
        scored = completion(client, depth=2, echo=True, logprobs=0, max_tokens=1)
        assert scored["usage"]["loops"] == 2


def draws(sampling: SamplingParams, logits: list[float]) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sample(torch.tensor(logits), sampling, generator) for _ in range(400)}


def test_only_likely_tokens_are_drawn():
    logits = [0.0, 1.0, 2.0, 2.1]
    assert draws(SamplingParams(1.0), logits) == {0, 1, 2, 3}
    assert draws(SamplingParams(1.0, top_k=2), logits) == {2, 3}
    assert draws(SamplingParams(1.0, top_k=9), logits) == {0, 1, 2, 3}
    assert draws(SamplingParams(1.0, min_p=0.3), logits) == {1, 2, 3}
    assert draws(SamplingParams(1.0, top_k=3, top_p=0.5), logits) == {2, 3}
    assert draws(SamplingParams(1.0, min_p=1.0), logits) == {3}


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert draws(SamplingParams(GREEDY_BELOW / 2), [0.0, 1.0, 1.001]) == {2}
    assert draws(SamplingParams(GREEDY_BELOW), [-300.0, 300.0, 299.0]) == {1}


def test_a_request_past_its_deadline_is_504(client):
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 9}
    response = client.post(COMPLETIONS, json=body, headers={"X-Request-Timeout": "1e-6"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
