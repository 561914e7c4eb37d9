"""What keys may have: rates and quotas, each key by itself, in OpenAI's shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serve.generation.rate_limits import KeyQuota, RateLimiter, RateLimitError
from serve.http.auth import KeyRing
from tests.serve.http.test_faults import bearer
from tests.serve.http.test_http import check_error, events
from tests.serve.worlds.test_store import Clock
from tests.serve.worlds.test_worlds import GOAL, SEEN

GIVEN = {
    "asks": KeyQuota(requests=3),
    "reads": KeyQuota(tokens=60),
    "keeps": KeyQuota(worlds=2),
    "writes": KeyQuota(bytes=len(GOAL + SEEN) + 10),
    "free": KeyQuota(),
}
WORLD = {"model": "tiny", "goal": GOAL, "observation": SEEN}
PROMPT = {"model": "tiny", "prompt": "boil", "max_tokens": 30}


@pytest.fixture
def service(serving, tiny_model) -> Iterator[httpx.Client]:
    """Every key is its own name."""
    ring = KeyRing({name: hashlib.sha256(name.encode()).hexdigest() for name in GIVEN}, GIVEN)
    with serving(tiny_model, keys=ring) as client:
        yield client


def post(service: httpx.Client, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return service.post(f"/v1/{path}", json=body, headers=bearer(key))


def left(response: httpx.Response) -> dict[str, str]:
    begin = "x-ratelimit-"
    return {name.removeprefix(begin): told for name, told in response.headers.items() if name.startswith(begin)}


def test_a_key_that_has_had_its_requests_hears_when_there_are_more(service):
    told = [left(service.get("/v1/models", headers=bearer("asks"))) for _ in range(3)]
    assert [one["remaining-requests"] for one in told] == ["2", "1", "0"]
    assert (told[-1]["limit-requests"], told[-1]["reset-requests"]) == ("3", "60s")
    refused = service.get("/v1/worlds", headers=bearer("asks"))
    check_error(refused, 429, None, "3 requests per minute")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 18 <= int(refused.headers["Retry-After"]) <= 20  # a third of a minute
    assert left(refused)["remaining-requests"] == "0"
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="asks", max_retries=0) as api:
        with pytest.raises(openai.RateLimitError) as caught:
            api.models.list()
        assert caught.value.code == "rate_limit_exceeded"
    assert service.get("/health", headers=bearer("asks")).status_code == 200
    others = service.get("/v1/models", headers=bearer("free"))
    assert (others.status_code, left(others)) == (200, {})


def test_tokens_count_when_they_are_read_and_written(service, tokenizer):
    prompt = len(tokenizer("boil")["input_ids"])
    first = post(service, "reads", "completions", PROMPT)
    assert int(left(first)["remaining-tokens"]) in (30 - prompt, 31 - prompt)  # a token comes back every second
    assert events(authorized(service, "reads"), "/v1/completions", PROMPT)
    refused = post(service, "reads", "completions", PROMPT)
    check_error(refused, 429, None, "60 tokens per minute")
    assert refused.json()["error"]["type"] == "tokens"
    assert int(refused.headers["Retry-After"]) >= 1
    assert service.get("/v1/worlds", headers=bearer("reads")).status_code == 200  # needs no tokens


def test_metrics_count_what_each_key_used(service):
    before = used(service)
    tokens = post(service, "free", "completions", PROMPT).json()["usage"]["total_tokens"]
    assert service.get("/v1/models", headers=bearer("free")).status_code == 200
    after = used(service)
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)} == {
        'requests_total{key="free",model_name="tiny"}': 2,
        'tokens_total{key="free",model_name="tiny"}': tokens,
    }


def used(service: httpx.Client) -> dict[str, float]:
    begin = "loopwm:key_"
    lines = [line.removeprefix(begin) for line in service.get("/metrics").text.splitlines() if line.startswith(begin)]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def authorized(service: httpx.Client, key: str) -> httpx.Client:
    return httpx.Client(base_url=service.base_url, headers=bearer(key), timeout=None, trust_env=False)


def test_worlds_cost_the_tokens_that_are_read_and_decoded(serving, tiny_model, monkeypatch):
    monkeypatch.setattr("serve.generation.rate_limits.MINUTE", 1e12)  # nothing comes back while it looks
    ring = KeyRing({"me": hashlib.sha256(b"me").hexdigest()}, {"me": KeyQuota(tokens=6000)})
    with serving(tiny_model, keys=ring) as service, authorized(service, "me") as client:
        client.post("/v1/worlds", json=WORLD, headers={"X-Request-Timeout": "0.000001"})
        had = int(left(client.get("/v1/models"))["remaining-tokens"])
        assert had < 6000, "who does not wait pays, too"

        def cost(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            nonlocal had
            answer = client.post(f"/v1/{path}", json=body)
            before, had = had, int(left(answer)["remaining-tokens"])
            return before - had, answer.json()

        read, world = cost("worlds", WORLD)
        path = f"worlds/{world['id']}"
        stepped, step = cost(f"{path}/step", {"actions": "wait", "max_tokens": 40})
        observed, seen = cost(f"{path}/observe", {"action": "wait", "observation": "Nothing."})
        asked, scored = cost("completions", {**PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert (read, observed, asked) == (world["tokens"], seen["tokens"], scored["usage"]["prompt_tokens"])
    slots = step["world"]["tokens"] - world["tokens"]  # the action, and what else a step appends
    assert 40 < stepped <= 40 + slots + 1


def test_a_key_has_so_many_worlds_and_so_much_text(service):
    names = [post(service, "keeps", "worlds", WORLD).json()["id"] for _ in range(2)]
    refused = post(service, "keeps", "worlds", WORLD)
    check_error(refused, 429, None, "2 + 1 > 2", "delete a world")
    assert refused.json()["error"]["code"] == "too_many_worlds"
    check_error(post(service, "keeps", f"worlds/{names[0]}/fork", {}), 429, None)
    name = post(service, "writes", "worlds", WORLD).json()["id"]
    check_error(post(service, "writes", "worlds", WORLD), 429, None, str(GIVEN["writes"].bytes), "delete a world")
    short = post(service, "writes", f"worlds/{name}/step", {"actions": "12345", "decode": "none"})
    assert short.status_code == 200
    before = service.get(f"/v1/worlds/{name}", headers=bearer("writes")).json()
    more = {"step": {"actions": "123456", "decode": "none"}, "observe": {"action": "wait", "observation": "1234567"}}
    for path, body in more.items():
        refused = post(service, "writes", f"worlds/{name}/{path}", body)
        check_error(refused, 429, None, "world text quota")
        assert refused.json()["error"]["code"] == "too_much_text"
    streamed = post(service, "writes", f"worlds/{name}/step", {"actions": "123456", "stream": True})
    check_error(streamed, 429, None, "world text quota")  # before anything is decoded
    assert service.get(f"/v1/worlds/{name}", headers=bearer("writes")).json() == before
    assert service.delete(f"/v1/worlds/{name}", headers=bearer("writes")).status_code == 200
    assert post(service, "writes", "worlds", WORLD).status_code == 201


def test_a_rate_fills_again_within_a_minute_and_debts_are_paid_first():
    clock = Clock()
    rate_limiter = RateLimiter({"me": KeyQuota(tokens=60)}, clock)
    rate_limiter.charge("me", "tokens", 150)
    with pytest.raises(RateLimitError, match="60 tokens") as caught:
        rate_limiter.check("me", "tokens")
    assert caught.value.retry_after == 91
    clock.now += 90
    with pytest.raises(RateLimitError):
        rate_limiter.check("me", "tokens")
    clock.now += 1
    rate_limiter.check("me", "tokens")
    clock.now += 1000
    assert rate_limiter.bucket("me", "tokens").level == 60


def test_other_allowances_leave_a_rate_that_stays_where_it_was():
    rate_limiter = RateLimiter({"one": KeyQuota(requests=9), "two": KeyQuota(requests=9)}, Clock())
    for key in ("one", "two"):
        rate_limiter.charge(key, "requests", 9)
    rate_limiter.replace({"one": KeyQuota(requests=9, tokens=5), "two": KeyQuota(requests=8)})
    with pytest.raises(RateLimitError):
        rate_limiter.check("one", "requests")
    rate_limiter.check("two", "requests")
    rate_limiter.replace({})
    rate_limiter.check("one", "requests")
