"""Asking an endpoint that answers, refuses, or misbehaves."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.models.endpoint import Address, Endpoint, Parameters, ReplyCache, read_reply
from eval.models.fewshot import Message
from eval.scores.predictions import read_records
from loopwm.records.errors import InputError
from tests.eval.mock_endpoint import MockEndpoint
from tests.fixtures.windows import MakeWindow, WriteSuite

QUESTION: list[Message] = [{"role": "user", "content": "What now?"}]


def name_the_item(body: dict[str, Any]) -> str:
    """The window's name and the number of actions, read off the last message."""
    asked = body["messages"][-1]["content"]
    return f"{re.findall(r'item (w[0-9]+)', asked)[-1]} after {asked.count('Action: go')}"


@pytest.fixture
def mock() -> Iterator[MockEndpoint]:
    server = MockEndpoint(lambda body: body["messages"][-1]["content"].upper())
    yield server
    server.close()


@pytest.fixture
def endpoint(mock: MockEndpoint, tmp_path: Path) -> Endpoint:
    return open_endpoint(mock, tmp_path)


def open_endpoint(mock: MockEndpoint, folder: Path, timeout: float = 30, **parameters: Any) -> Endpoint:
    cache = ReplyCache(folder / "replies.sqlite")
    return Endpoint(Address(mock.url, "m"), cache, timeout=timeout, parameters=Parameters(**parameters))


def test_what_was_answered_is_not_asked_again_by_another_process(
    mock: MockEndpoint, endpoint: Endpoint, tmp_path: Path
) -> None:
    assert endpoint.complete(QUESTION) == "WHAT NOW?"
    assert open_endpoint(mock, tmp_path).complete(QUESTION) == "WHAT NOW?"
    assert mock.attempts.total() == 1


def test_another_model_or_address_is_another_request(mock: MockEndpoint, endpoint: Endpoint, tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "replies.sqlite")
    endpoint.complete(QUESTION)
    Endpoint(Address(mock.url, "other"), cache).complete(QUESTION)
    Endpoint(Address(mock.url.replace("127.0.0.1", "localhost"), "m"), cache).complete(QUESTION)
    assert mock.attempts.total() == 3


def test_equal_conversations_are_asked_once(mock: MockEndpoint, endpoint: Endpoint) -> None:
    other: list[Message] = [{"role": "user", "content": "and then?"}]
    replies = endpoint.complete_all([QUESTION, other, QUESTION])
    assert [reply.text for reply in replies] == ["WHAT NOW?", "AND THEN?", "WHAT NOW?"]
    assert mock.attempts.total() == 2


@pytest.mark.parametrize("fault", ["error", "garbage", "no choices", "drop", "rate limit"])
def test_a_passing_fault_is_asked_again(mock: MockEndpoint, endpoint: Endpoint, fault: str) -> None:
    mock.script = [fault, fault]
    assert endpoint.complete(QUESTION) == "WHAT NOW?"
    assert mock.attempts.total() == 3


def test_slow_answer_is_requested_again(mock: MockEndpoint, tmp_path: Path) -> None:
    mock.script, mock.slow = ["slow"], 2.0
    assert open_endpoint(mock, tmp_path, timeout=0.4).complete(QUESTION) == "WHAT NOW?"
    assert mock.attempts.total() == 2
    assert mock.times[1] - mock.times[0] < 1.9


def test_retry_after_is_waited_for(mock: MockEndpoint, endpoint: Endpoint) -> None:
    mock.script, mock.retry_after = ["rate limit"], "2"
    endpoint.complete(QUESTION)
    assert mock.times[1] - mock.times[0] >= 2


def test_a_long_wait_ends_the_run_instead(mock: MockEndpoint, endpoint: Endpoint) -> None:
    mock.script, mock.retry_after = ["rate limit"], "86400"
    with pytest.raises(InputError, match="status 429"):
        endpoint.complete(QUESTION)


def test_a_refusal_is_not_asked_again_and_stops_the_others(mock: MockEndpoint, endpoint: Endpoint) -> None:
    mock.script = ["refusal", *["error"] * 100]
    conversations: list[list[Message]] = [[{"role": "user", "content": str(i)}] for i in range(50)]
    started = time.monotonic()
    with pytest.raises(InputError, match="status 401") as error:
        endpoint.complete_all(conversations)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 5
    assert mock.attempts.total() < 50


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead. (see --max-comp"),
        ({"max_completion_tokens": 20}, "'temperature' does not support 0 with this model. Only the default (1) val"),
        ({"max_completion_tokens": 20}, "supported. (see --no-temperature)"),
    ],
)
def test_a_refused_parameter_is_answered_by_the_option_that_avoids_it(
    mock: MockEndpoint, tmp_path: Path, parameters: dict[str, Any], said: str
) -> None:
    mock.current = True
    with pytest.raises(InputError, match=re.escape(said)) as error:
        open_endpoint(mock, tmp_path, **parameters).complete(QUESTION)
    assert str(error.value).startswith(f"{mock.url}/chat/completions: status 400: Unsupported ")
    assert mock.attempts.total() == 1


def test_a_current_model_is_asked_without_what_it_refuses(mock: MockEndpoint, tmp_path: Path) -> None:
    mock.current = True
    endpoint = open_endpoint(mock, tmp_path, max_completion_tokens=20, greedy=False, reasoning_effort="low")
    assert endpoint.complete(QUESTION) == "WHAT NOW?"
    assert endpoint.parameters.body == {"max_completion_tokens": 20, "reasoning_effort": "low"}
    assert Parameters().body == {"max_tokens": 512, "temperature": 0}, "what was cached before is found"


@pytest.mark.parametrize("aloud", [False, True])
def test_thoughts_are_no_part_of_the_answer(mock: MockEndpoint, endpoint: Endpoint, aloud: bool) -> None:
    mock.thoughts, mock.thinks_aloud = 100, aloud
    assert endpoint.complete(QUESTION).strip() == "WHAT NOW?"


@pytest.mark.parametrize("aloud", [False, True])
def test_an_answer_cut_by_length_is_none_and_asked_for_again(mock: MockEndpoint, tmp_path: Path, aloud: bool) -> None:
    mock.thoughts, mock.thinks_aloud = 100, aloud
    short = open_endpoint(mock, tmp_path, max_tokens=50)
    for _ in range(2):
        (reply,) = short.complete_all([QUESTION])
        assert (reply.cut, reply.text, reply.completion_tokens) == (True, "", 50)
    assert mock.attempts.total() == 2
    assert open_endpoint(mock, tmp_path, max_tokens=50, reasoning_effort="low").complete_all([QUESTION])[0].cut
    mock.thoughts = 0
    assert short.complete(QUESTION) == short.complete(QUESTION) == "WHAT NOW?"
    assert mock.attempts.total() == 4
    assert sorted(reply.cut for reply in short.paid_all([QUESTION])) == [False, True, True]


def test_a_cut_answer_that_an_older_run_cached_is_asked_for_again(mock: MockEndpoint, tmp_path: Path) -> None:
    mock.thoughts = 600
    open_endpoint(mock, tmp_path).complete(QUESTION)
    cache = sqlite3.connect(tmp_path / "replies.sqlite")
    cache.execute("INSERT INTO replies SELECT key, '', reply FROM cut")
    cache.commit()
    mock.thoughts = 0
    assert open_endpoint(mock, tmp_path).complete(QUESTION) == "WHAT NOW?"
    assert open_endpoint(mock, tmp_path).complete(QUESTION) == "WHAT NOW?"
    assert mock.attempts.total() == 2


def test_a_cut_answer_may_have_no_content_at_all() -> None:
    assert read_reply({"choices": [{"message": {"role": "assistant"}, "finish_reason": "length"}]}).cut
    with pytest.raises(LookupError):
        read_reply({"choices": [{"message": {"role": "assistant"}, "finish_reason": "stop"}]})


def test_a_run_counts_what_was_not_answered_and_asks_again(
    mock: MockEndpoint, make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Every second item is thought about for longer than the limit, the first time."""
    suite, out = write_suite([make_window(f"w{i}", goal=f"This is item w{i}.") for i in range(6)]), tmp_path / "out"
    options = ["run", "--model", f"openai:{mock.url}#m", "--suite", str(suite), "--context", "observed", "--shots", "0"]
    options += ["--horizons", "1", "--out", str(out), "--reply-cache", str(tmp_path / "replies.sqlite")]
    options += ["--max-completion-tokens", "60", "--no-temperature", "--reasoning-effort", "high"]
    mock.current = True

    mock.answer = name_the_item
    mock.hard = lambda body: int(name_the_item(body)[1]) % 2 == 1
    mock.thoughts = 100
    assert main(options) == 0
    assert "3 answers did not come: they count as wrong. The same command asks again." in capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    assert (found["unanswered"], found["rows"][0]["n"]) == (3, 6)
    assert found["provenance"]["usage"] == {
        "requests": 6, "cut": 3, "counted": 6, "prompt_tokens": 600, "completion_tokens": 3 * 60 + 3 * 7,
    }  # fmt: skip
    sent = {name: found["provenance"].get(name) for name in ("max_tokens", "max_completion_tokens", "temperature")}
    assert sent == {"max_tokens": None, "max_completion_tokens": 60, "temperature": None}
    assert "3 answers did not come" in (out / "report.md").read_text()

    mock.hard = lambda body: False
    assert main(options) == 0
    records = read_records(out / "predictions.jsonl")
    assert {name: record["prediction"] for (name, _), record in records.items()} == {
        f"w{i}": f"w{i} after 1" for i in range(6)
    }
    assert json.loads((out / "results.json").read_text())["unanswered"] == 0
    assert mock.attempts.total() == 9, "what was answered was not asked again"


@pytest.mark.parametrize(
    ("fault", "message"), [("error", "status 500"), ("drop", "no answer in 2 attempts"), ("garbage", "not a chat comp")]
)
def test_attempts_end_with_the_last_fault_named(
    mock: MockEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr("eval.models.endpoint.ATTEMPTS", 2)
    mock.script = [fault] * 2
    with pytest.raises(InputError, match=message):
        open_endpoint(mock, tmp_path).complete(QUESTION)


def test_the_key_is_sent_and_kept_nowhere(mock: MockEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    open_endpoint(mock, tmp_path).complete(QUESTION)
    assert {name.lower(): value for name, value in mock.headers.items()}["authorization"] == "Bearer secret-key"
    assert b"secret-key" not in (tmp_path / "replies.sqlite").read_bytes()


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("notes " * 200)
    with pytest.raises(InputError, match=r"x.sqlite: cache of replies"):
        ReplyCache(tmp_path / "x.sqlite")
    with pytest.raises(InputError, match=r": cache of replies: unable to open"):
        ReplyCache(tmp_path)


@pytest.mark.parametrize(
    "address", ["openai:", "openai:http://h/v1", "openai:ftp://h#m", "openai:#m", "openai:http://a:b@h/v1#m"]
)
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="--model"):
        Address.parse(address, "--model")


@pytest.mark.slow
def test_a_killed_run_over_a_bad_endpoint_ends_complete_with_each_item_asked_once(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    """500 items, a quarter of all requests fail in six ways, killed after 200 answers."""
    actions = ["go to hallway", "go to kitchen", "go to hallway", "go to kitchen", "go to hallway"]
    suite = write_suite([make_window(f"w{i}", goal=f"This is item w{i}.", actions=actions) for i in range(100)])
    mock = MockEndpoint(name_the_item, fault_share=0.25, seed=5, slow=3.0)
    out, cache = tmp_path / "out", tmp_path / "replies.sqlite"
    options = [
        "run",
        "--model",
        f"openai:{mock.url}#m",
        "--suite",
        str(suite),
        "--context",
        "observed",
        "--out",
        str(out),
    ]
    options += [
        "--reply-cache",
        str(cache),
        "--concurrency",
        "16",
        "--request-timeout",
        "2",
        "--shots",
        "2",
        "--batch-size",
        "100",
    ]

    process = subprocess.Popen([sys.executable, "-m", "eval", *options], stderr=subprocess.DEVNULL)
    while mock.answered.total() < 200 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = mock.answered.total()
    assert 200 <= before < 500

    assert main(options) == 0
    records = read_records(out / "predictions.jsonl")
    assert len(records) == 500
    assert all(record["prediction"] == f"{name} after {k}" for (name, k), record in records.items())
    assert all(mock.faults[fault] > 3 for fault in ("rate limit", "error", "garbage", "no choices", "slow", "drop"))
    assert len(mock.answered) == 500
    assert mock.answered.total() - 500 <= 16  # answers on their way to the killed process were never written down

    usage = json.loads((out / "results.json").read_text())["provenance"]["usage"]
    assert (usage["requests"], usage["counted"]) == (500, 500)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50_000, 3_500)

    asked = mock.attempts.total()
    assert main(options) == 0  # finished
    assert main([*options, "--out", str(tmp_path / "again")]) == 0  # cached
    assert mock.attempts.total() == asked
    mock.close()
