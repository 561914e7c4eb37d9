"""`python -m serve` as a user starts it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loopwm.core.exit_rules import RULES, Fixed
from loopwm.records.command import missing_package
from loopwm.records.errors import InputError
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from serve.run import _address, listen, listen_unix
from serve.start import build_parser, main
from tests.fixtures.windows import episode

ROOT = Path(__file__).parents[2]


def refusal(capsys, *arguments: str) -> str:
    assert main([*arguments, "--port", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_missing_checkpoint_is_one_line(capsys, tmp_path):
    assert str(tmp_path / "none") in refusal(capsys, "--model", str(tmp_path / "none"))


def test_options_come_from_the_line_then_from_variables_then_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "service.yaml"
    file.write_text("port: 1\nmax-batch: 2\nmax-queue: 3\nallowed-hosts: [a, b]\ndepth: 'gate:tau=0.5,limit=4'\n")
    monkeypatch.setenv("LOOPWM_MAX_BATCH", "20")
    monkeypatch.setenv("LOOPWM_PORT", "10")
    # `datasets` replaces os.environ by a copy when it maps in several processes: the parser's default may be older.
    options = build_parser().parse_args(["--config", str(file), "--port", "100"], env_vars=os.environ)
    assert (options.port, options.max_batch, options.max_queue, options.allowed_hosts) == (100, 20, 3, ["a", "b"])
    assert options.depth == "gate:tau=0.5,limit=4"
    assert options.worlds_file is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-bach: 2\n", "did you mean --max-batch?"),
        ("max-batch: none\n", "--max-batch: must be a whole number >= 1, got 'none'"),
        ("max-batch: [1\n", "service.yaml"),
        ("root-path: small\n", "--root-path: must begin with /, got 'small'"),
        (None, "service.yaml"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_one_line(capsys, tmp_path, text, words):
    file = tmp_path / "service.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args(["--config", str(file)])
    told = capsys.readouterr().err
    assert (exit_info.value.code, told.count("\n")) == (2, 1)
    assert words in told


def test_damaged_weights_are_one_line(capsys, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert str(folder) in refusal(capsys, "--model", str(folder))


def test_a_config_that_does_not_fit_the_weights_is_one_line(capsys, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 99}))
    assert "mlp" in refusal(capsys, "--model", str(folder))


def test_a_depth_the_checkpoint_does_not_have_is_one_line(capsys, checkpoint, tiny_model, monkeypatch):
    limit = tiny_model.config.max_loops
    assert f"max_loops = {limit}" in refusal(capsys, "--model", str(checkpoint), "--depth", str(limit + 1))
    monkeypatch.setitem(RULES, "shared", type("Shared", (Fixed,), {"depends_on_batch": True}))
    shared = "shared:loops=1"
    assert "must not depend on other requests" in refusal(capsys, "--model", str(checkpoint), "--depth", shared)
    assert "needs an exit gate" in refusal(capsys, "--model", str(checkpoint), "--depth", "gate:tau=0.5,limit=1")


@pytest.mark.parametrize(("switch", "value"), [("decode_sees", "state"), ("propagate", "latent")])
def test_a_checkpoint_that_is_more_than_a_language_model_is_one_line(capsys, tokenizer, tmp_path, switch, value):
    settings = {"vocab_size": len(tokenizer), **PRESETS["tiny"], switch: value}
    LoopWMForCausalLM(LoopWMConfig(**settings)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # saving shows its progress unless an earlier test has silenced it
    assert f"for the service, got {value}" in refusal(capsys, "--model", str(tmp_path))


def test_keys_that_can_not_be_read_are_one_line(capsys, checkpoint, tmp_path):
    keys = tmp_path / "keys"
    assert str(keys) in refusal(capsys, "--model", str(checkpoint), "--api-keys", str(keys))
    keys.write_text("# ours\n\nalice 1234\n")
    assert f"{keys}, line 3" in refusal(capsys, "--model", str(checkpoint), "--api-keys", str(keys))


@pytest.mark.parametrize("option", ["--grace", "--world-ttl"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_a_time_that_is_none_is_one_line(capsys, option, seconds):
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"{option}={seconds}"])
    assert f"must be seconds, at least 0, got {seconds!r}" in capsys.readouterr().err


def test_an_address_of_ipv6_is_told_as_a_url():
    with listen("::1", 0) as listener:
        assert _address(listener, "/x", warn=True) == f"http://[::1]:{listener.getsockname()[1]}/x/v1"


def test_accepted_connections_send_at_once():
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as end,
    ):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "example: python -m serve" in shown
    assert "printf %s" in shown


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("requests", "requests: must be a whole number of at least 1, got ''"),
        ("speed=3", "speed: must be one of requests, tokens, concurrent, worlds, bytes"),
        ("worlds=1 worlds=2", "worlds: given twice"),
        ("tokens=0", "tokens: must be a whole number of at least 1, got '0'"),
        ("bytes=1e6", "bytes: must be a whole number of at least 1, got '1e6'"),
    ],
)
def test_limits_of_a_key_that_are_none_are_one_line(capsys, checkpoint, tmp_path, line, told):
    keys = tmp_path / "keys"
    keys.write_text(f"alice {'0' * 64} {line}\n")
    assert f"{keys}, line 1: {told}" in refusal(capsys, "--model", str(checkpoint), "--api-keys", str(keys))


def key_line(name: str, limits: str = "") -> str:
    """Of a key that is the name."""
    return f"{name} {hashlib.sha256(name.encode()).hexdigest()} {limits}\n"


@contextmanager
def ended(server: subprocess.Popen[str]) -> Iterator[None]:
    """Also where the test fails: it would be waited for."""
    try:
        yield
    finally:
        server.kill()


@pytest.mark.slow
def test_the_key_file_is_read_again_when_told_and_nothing_that_runs_is_dropped(checkpoint, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(key_line("old"))
    command = [sys.executable, "-m", "serve", "--model", str(checkpoint), "--port", "0", "--access-log", "off"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--api-keys", str(keys)], cwd=ROOT, **pipes) as server, ended(server):
        base = server.stdout.readline().split()[-1]

        def read_again() -> str:
            server.send_signal(signal.SIGHUP)
            line: str = server.stderr.readline()
            return line

        def ask(key: str) -> httpx.Response:
            return httpx.get(
                f"{base}/models", headers={"Authorization": f"Bearer {key}"}, timeout=None, trust_env=False
            )

        body = {"model": "tiny-world", "prompt": "boil", "max_tokens": 300, "temperature": 2, "stream": True}
        headers = {"Authorization": "Bearer old"}
        with httpx.stream("POST", f"{base}/completions", json={**body, "ignore_eos": True}, headers=headers,
                          timeout=None, trust_env=False) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)
            keys.write_text(key_line("new") + "# and\nnonsense\n")
            wrong = "must be NAME and a SHA-256 of 64 hexadecimal digits; keeping the previous keys"
            assert read_again() == f"error: {keys}, line 3: {wrong}\n"
            assert (ask("old").status_code, ask("new").status_code) == (200, 401)
            keys.write_text(key_line("new", "requests=2"))
            assert read_again() == f"info: {keys}: reloaded 1 keys\n"
            assert (ask("old").status_code, ask("new").status_code) == (401, 200)
            assert ask("new").headers["x-ratelimit-remaining-requests"] == "0"
            assert ask("new").status_code == 429
            assert "data: [DONE]" in list(lines)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
def test_it_serves_under_the_folders_name_and_finishes_what_runs_when_told_to_end(checkpoint, tmp_path):
    memory = tmp_path / "train.jsonl"
    memory.write_text(episode(("take red pan", "You take the red pan.")))
    command = [sys.executable, "-m", "serve", "--model", str(checkpoint), "--port", "0", "--memory", str(memory)]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        base = server.stdout.readline().split()[-1]
        assert base.startswith("http://127.0.0.1:")
        world = httpx.post(f"{base}/worlds", json={"model": "tiny-world", "goal": "g", "observation": "o"}).json()
        step = httpx.post(
            f"{base}/worlds/{world['id']}/step", json={"actions": "take blue pan", "max_tokens": 12}
        ).json()
        assert step["steps"][0]["observation"] == "You take the blue pan."
        body = {"model": "tiny-world", "prompt": "boil", "max_tokens": 60, "temperature": 2, "stream": True}
        with httpx.stream("POST", f"{base}/completions", json=body, timeout=None) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert server.wait() == 0


@pytest.mark.slow
def test_it_ends_if_it_is_told_to_before_it_answers(checkpoint):
    code = f"""
import os, signal
import serve.run, serve.start
serve.run.settle = lambda: os.kill(os.getpid(), signal.SIGTERM)
serve.start.main(["--model", {str(checkpoint)!r}, "--port", "0"])
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr


def test_a_unix_socket_takes_the_place_of_one_that_was_left_behind_and_of_nothing_else(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_unix(path) as living:
        assert path.stat().st_mode & 0o777 == 0o666
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            living.accept()[0].close()
        with pytest.raises(InputError, match=f"--uds: cannot listen on {path}: Address already in use"):
            listen_unix(path)
    path.unlink()
    path.write_text("a file")
    with pytest.raises(InputError, match="Address already in use"):
        listen_unix(path)
    assert path.read_text() == "a file"


@pytest.mark.slow
def test_it_serves_several_names_on_a_unix_socket(checkpoint, tmp_path):
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "serve", "--model", str(checkpoint), "--uds", str(path), "--name", "one", "two"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server, ended(server):
        assert server.stdout.readline().endswith(f" on unix:{path}\n")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
            assert client.post("/v1/completions", json={"model": "two", "prompt": "boil"}).json()["model"] == "one"
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_missing_package_is_one_line_and_a_missing_module_of_ours_is_a_fault(capsys):
    assert missing_package(ModuleNotFoundError(name="fastapi.responses"), "serve") == 2
    assert capsys.readouterr().err == "error: the package fastapi is not installed: pip install 'loopwm[serve]'\n"
    with pytest.raises(ModuleNotFoundError):
        missing_package(ModuleNotFoundError(name="serve.nothing"), "serve")
