"""Ten mistakes of new users: one line each names what is at fault and what to do about it."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopwm.__main__ import main
from tests.fixtures.shards import toy_episode, write_toy_shards
from tests.training.test_train_logs import log, write_logs

ROOT = Path(__file__).parents[1]
REFERENCE, SMALL = (str(ROOT / f"configs/{name}.yaml") for name in ("reference", "text-small"))

GOAL = {"role": "system", "content": "Your task is to boil water."}
SEEN = {"role": "assistant", "content": "This room is called the kitchen."}
ACTION = {"role": "user", "content": "look"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [GOAL, SEEN, ACTION]}
WORLD = {"model": "tiny", "goal": GOAL["content"], "observation": SEEN["content"]}

IN_LIST = 'must be a list, got "look"; write ["look"]'
NO_OBSERVATION = (
    "messages: must begin with system and assistant, got ['system', 'user']; expected: system (goal), assistant "
    "(first observation), then user (action) and assistant (observation) in turn, and one or more user messages (the "
    "actions to imagine) at the end"
)
OTHER_MODEL = "The model 'gpt' does not exist; this service has 'tiny'"


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Run `loopwm` and return its only line on standard error."""
    assert main(list(command)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "message"),
    [
        pytest.param("worlds/w/plan", {"candidates": "look"}, 400, "candidates", f"candidates: {IN_LIST}", id="1-text"),
        pytest.param("worlds/w/plan", {"candidates": ["look"]}, 400, "candidates[0]", f"candidates[0]: {IN_LIST}",
                     id="1-text-in-list"),
        pytest.param("worlds/w/plan", {"candidates": "look " * 20}, 400, "candidates",
                     "candidates: must be a list; write [...]", id="1-long-text"),
        pytest.param("worlds", {**WORLD, "actions": "look"}, 400, "actions", f"actions: {IN_LIST}", id="1-actions"),
        pytest.param("chat/completions", {**CHAT, "messages": [GOAL, ACTION]}, 400, "messages", NO_OBSERVATION,
                     id="2-no-observation"),
        pytest.param("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools",
                     "tools: not supported; leave it out", id="3-tools"),
        pytest.param("chat/completions", {**CHAT, "model": "gpt"}, 404, "model", OTHER_MODEL, id="9-model-of-chat"),
        pytest.param("worlds", {**WORLD, "model": "gpt"}, 404, "model", OTHER_MODEL, id="9-model-of-world"),
    ],
)  # fmt: skip
def test_request_with_mistake_names_field_and_cure(client, path, body, status, field, message):
    response = client.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert (error["param"], error["message"]) == (field, message)


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("serve", "fastapi", "serve"), ("play", "httpx", "serve"), ("mcp", "mcp", "mcp")]
)
def test_4_command_without_its_extra_says_what_to_install(command, package, extra):
    code = f"import sys; sys.modules[{package!r}] = None; from loopwm.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, cwd=ROOT, check=False)
    expected = f"error: the package {package} is not installed: pip install 'loopwm[{extra}]'\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize(("options", "extra"), [([], "train"), (["--config", SMALL], "train,pixel")])
def test_4_train_without_its_extra_says_what_to_install(options, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for module in ("loopwm.trainer.trainer", "loopwm.text.training.fine_tune"):  # to import them again
        monkeypatch.delitem(sys.modules, module, raising=False)
    logs = [] if options else [str(write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(10)]))]
    assert main(["train", *logs, *options, "--out", str(tmp_path / "run")]) == 2
    expected = f"error: the package accelerate is not installed: pip install 'loopwm[{extra}]'\n"
    assert capsys.readouterr().err.endswith(expected)


def test_5_unknown_preset_lists_the_presets(tmp_path, capsys):
    # `auto` would measure the precision, which accelerate keeps for all runs of the process.
    options = ["--config", REFERENCE, "run.mixed_precision=no", "model.preset=huge", "--out", str(tmp_path / "run")]
    assert refusal(capsys, "train", *options) == (
        "error: model.preset: must be one of tiny, mini, reference, small, base, large, 1b, weights, got 'huge'\n"
    )


def test_6_three_short_episodes_are_too_few_to_train_on(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(3)])
    assert refusal(capsys, "train", str(logs), "--out", str(tmp_path / "run")) == (
        "error: LOGS: must have at least 50 steps to train on, got 16; add episodes\n"
    )


def test_7_shards_without_look_name_the_context(config_file, tmp_path, capsys):
    episodes = [toy_episode(number) for number in range(8)]
    bare = [tuple(replace(step, look=None, inventory=None) for step in episode.steps) for episode in episodes]
    write_toy_shards(tmp_path, (replace(episode, steps=steps) for episode, steps in zip(episodes, bare, strict=True)))
    options = ["--config", str(config_file), "--out", str(tmp_path / "run"), f"data.train=[{tmp_path}]"]
    assert refusal(capsys, "train", *options) == (
        "error: data.regimes.snapshot: must be 0, no step of the shards has look and inventory within "
        "data.trunk_tokens_max\n"
    )


def test_8_busy_port_is_named_with_how_to_choose_another(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refusal(capsys, "serve", "--port", port) == (
            f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port, or 0\n"
        )


def test_10_eval_of_sample_prints_its_interval(tmp_path, capsys):
    options = ["--model", "copy", "--suite", "scienceworld-500", "--context", "observed", "--limit", "40"]
    assert main(["eval", "run", *options, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith(
        "40 of 40 windows scored, 0 refused under `observed`.\n"
        "Exact match at horizon 5: 0.0 (0.0-9.9), 95 % over games.\n"
        "A sample of 40 of 500 windows; without --limit all are predicted.\n"
    )
