"""The playground in the terminal, over the real app."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition
from loopwm.text.world import WorldModel
from loopwm.worlds.http import Client
from loopwm.worlds.protocol import WorldError
from serve.__main__ import main
from serve.local_service import connected
from serve.play import EXAMPLES, Game

START = {
    "goal": "Your task is to boil water.",
    "observation": "This room is called the kitchen.",
    "history": [{"action": "wait", "observation": "Nothing."}],
    "actions": ["open door", "look around"],
    "observations": ["It is open.", "A kitchen."],
}
SEEN = Context(str(START["goal"]), str(START["observation"]), (Transition("wait", "Nothing."),))


TOKENS = 12
"""Most tokens decoded: random models seldom come to an end."""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("serve.http.worlds.DEFAULT_MAX_TOKENS", TOKENS)


class Terminal:
    """A game, what it wrote since the last look, and the lines that it will read."""

    def __init__(self, client: httpx.Client) -> None:
        self.written: list[str] = []
        self.lines: list[str] = []
        self.game = Game(Client(str(client.base_url)), START, self.written.append, lambda: self.lines.pop(0))

    def __call__(self, *commands: str) -> str:
        self.written.clear()
        for command in commands:
            self.game.command(command)
        return "".join(self.written)


@pytest.fixture
def terminal(worlds_client) -> Terminal:
    return Terminal(worlds_client)


def decoded(library: WorldModel, context: Context, *actions: str) -> str:
    world = library.encode([context])
    for action in actions:
        world = library.advance(world, [action])
    return library.decode(world, TOKENS)[0]


def test_actions_show_what_the_library_decodes(terminal, library):
    texts = [decoded(library, SEEN, "open door"), decoded(library, SEEN, "open door", "look around")]
    said = terminal("open door; look around")
    facts = r"\n  \[reward .*, goes on .*, \d loops to advance, \d.\d a token\]\n"
    assert re.fullmatch("".join(re.escape(text) + facts for text in texts), said)


def test_an_observation_that_breaks_off_is_told_and_changes_nothing(terminal, library, monkeypatch):
    forward, calls = type(library.model.model).forward, []

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs) if len(calls) < 12 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(type(library.model.model), "forward", fails_later)
        patch.setattr("serve.engine.batch.MOST_DRAFTED", 0)  # one token a pass
        with pytest.raises(WorldError, match="The service failed"):
            terminal("open door")
    assert not terminal.written
    assert terminal("worlds") == "* 1  (no actions)\n"


def test_a_fork_goes_its_own_way_and_worlds_lists_both(terminal, library):
    terminal("open door", "fork", "look around")
    assert terminal("worlds") == "  1  open door\n* 2  open door; look around\n"
    said = terminal("world 1", "wait")
    assert said.startswith(decoded(library, SEEN, "open door", "wait") + "\n")


def test_an_observation_takes_the_place_of_what_was_imagined_since_the_last(terminal, library):
    terminal.lines = ["It is open.", "You see a hallway.", "."]
    terminal("look around", "wait", "observe open door")
    assert terminal("worlds") == "* 1  open door\n"
    steps = (*SEEN.history, Transition("open door", "It is open.\nYou see a hallway."))
    expected = decoded(library, Context(SEEN.goal, SEEN.observation, steps), "wait")
    assert terminal("wait").startswith(expected + "\n")


def test_a_plan_marks_the_best_and_leaves_the_world(terminal):
    rows = terminal("plan open door; wait | look around").splitlines()[:2]
    scores = [float(row[2:].split()[0]) for row in rows]
    assert [row[0] for row in rows] == ["*" if score == max(scores) else " " for score in scores]
    assert rows[0].endswith("open door; wait")
    assert terminal("worlds") == "* 1  (no actions)\n"


def test_truth_is_told_only_for_the_recorded_actions(terminal):
    terminal("open door", "look around")
    assert terminal("truth") == "A kitchen.\n"
    with pytest.raises(InputError, match="nothing is recorded"):
        terminal("wait", "truth")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("world 9", "must be a number from 1 to 1"),
        ("act ;", "action: must not be empty"),
        ("plan open door | ", "action: must not be empty"),
        ("observe", "must be followed by an action"),
        ("x" * 3000, "status 400"),
        ("; ".join(["wait"] * 65), "status 400"),
    ],
)
def test_a_wrong_command_is_told_and_changes_nothing(terminal, command, message):
    with pytest.raises((InputError, WorldError), match=message):
        terminal(command)
    assert terminal("worlds") == "* 1  (no actions)\n"


def test_commands_come_from_standard_input(worlds_client, capsys, monkeypatch, tmp_path):
    lines = iter(["act worlds", "world 5", "worlds", "quit"])
    monkeypatch.setattr("builtins.input", lambda _="": next(lines))
    (tmp_path / "world.json").write_text(json.dumps(START))
    assert main(["play", "--url", f"{worlds_client.base_url}/v1", "--world", str(tmp_path / "world.json")]) == 0
    said = capsys.readouterr().out
    assert "> wait\nNothing.\n" in said
    assert "error: world: must be a number from 1 to 1, got '5'" in said
    assert said.endswith("* 1  worlds\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "does not answer: "),
        (["--url", "127.0.0.1"], "does not begin with http"),
        (["--example", "none/1"], "must be one of melt/"),
        (["--world", "missing.json"], "missing.json: no such file"),
        (["--url", "http://127.0.0.1:1", "--api-key-file", "missing"], "--api-key-file: "),
        pytest.param(["--model", "missing"], "the service did not start", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_start_is_one_line(capsys, arguments, message):
    assert main(["play", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_the_terminal_starts_from_the_pages_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["play", "--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert all(example["name"] in told for example in json.loads(EXAMPLES.read_text()))


def test_a_service_of_its_own_logs_no_accesses_and_has_its_own_options(checkpoint, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("LOOPWM_UDS", str(tmp_path / "socket"))
    monkeypatch.setenv("LOOPWM_DEPTH", "1")
    with connected(argparse.Namespace(url=None, model=checkpoint, api_key_file=None)) as client:
        assert client.model()
    assert "/v1/models" not in capfd.readouterr().err


def test_an_exported_world_goes_on_where_it_was(worlds_client):
    made = worlds_client.post("/v1/worlds", json={"model": "tiny", "goal": "g", "observation": "o"}).json()["id"]
    worlds_client.post(f"/v1/worlds/{made}/step", json={"actions": ["open door", "wait"], "decode": "none"})
    export = worlds_client.get(f"/v1/worlds/{made}/export").json()
    said: list[str] = []
    game = Game(Client(str(worlds_client.base_url)), {**export, "steps_cut": 2}, said.append, lambda: "")
    for command in ("worlds", "fork"):
        game.command(command)
    assert said[-2] == "* 1  open door; wait\n"
    held = [worlds_client.get(f"/v1/worlds/{branch.id}").json() for branch in game._branches]
    assert [(world["imagined_steps"], world["steps_cut"]) for world in held] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_of_its_own_ends_with_the_command(checkpoint, number):
    command = [sys.executable, "-P", "-m", "serve", "play", "--model", str(checkpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as played:
        assert played.stdout.readline()  # the game has begun
        (server,) = Path(f"/proc/{played.pid}/task/{played.pid}/children").read_text().split()
        played.send_signal(number)
        assert played.wait() == 128 + number
    assert not Path(f"/proc/{server}").exists(), "it is waited for"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"actions": None, "observations": None}, ""),
        ({"actions": 5}, "actions: must be a list"),
        ({"actions": 5, "observations": ["It is open."]}, "--world: actions, observations: "),
    ],
)
def test_actions_of_a_file_are_lists_or_one_line(worlds_client, capsys, monkeypatch, tmp_path, fields, message):
    monkeypatch.setattr("builtins.input", lambda _="": "quit")
    path = tmp_path / "world.json"
    path.write_text(json.dumps({"goal": "g", "observation": "o", **fields}))
    assert main(["play", "--url", str(worlds_client.base_url), "--world", str(path)]) == (2 if message else 0)
    told = capsys.readouterr().err
    errors = [line for line in told.splitlines() if not line.startswith("warning")]
    assert len(errors) == bool(message)
    assert message in told
