"""How the service is put on a machine: what the image, the unit and the page name is there, and the steps work."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from loopwm import __main__ as command
from loopwm.records.files import PACKAGED
from serve.http import server
from serve.start import build_parser

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
UNIT = (ROOT / "deploy/loopwm.service").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/production.md").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """What stands behind an instruction of the image, each time."""
    return re.findall(rf"^{name} +(.+)$", DOCKERFILE, re.M)


def unit(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.+)$", UNIT, re.M)
    return value


def commands_of_the_page() -> list[list[str]]:
    """Calls of `loopwm serve` in the page's blocks, as words."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines if "loopwm serve" in line]
    return [words[words.index("serve") :] for words in calls]


def entrypoint() -> list[str]:
    (told,) = instructions("ENTRYPOINT")
    words: list[str] = json.loads(told)
    return words


def test_the_image_and_the_unit_start_the_service_with_options_that_it_has():
    (image, started), (program, *unit_words) = (entrypoint()[:1], entrypoint()[1:]), shlex.split(unit("ExecStart"))
    assert image == [Path(program).name] == list(PROJECT["project"]["scripts"])
    for words in (started, unit_words, *commands_of_the_page()):
        assert words[0] == "serve"
        build_parser().parse_args(words[1:])  # ends the test where it does not know one
    assert len(commands_of_the_page()) >= 1


def test_every_option_that_the_page_names_is_one():
    options = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= options


def test_every_metric_that_the_page_names_is_told(client):
    told = client.get("/metrics").text
    names = set(re.findall(r"`(loopwm:[a-z_]+)", PAGE))
    assert len(names) > 4
    assert [name for name in sorted(names) if f"# TYPE {name} " not in told] == []


def test_what_the_image_copies_is_there_and_not_left_out_of_what_is_sent_to_it():
    copied = [word for line in instructions("COPY") for word in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
    for package in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert package.rstrip("*") in copied
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= set(copied)


def test_the_image_installs_the_service_with_a_torch_of_the_constraints_and_runs_as_nobody_special():
    torch, project = (line for line in instructions("RUN") if "pip install" in line)
    (pinned,) = re.findall(r"^(torch==.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned in torch.split()
    assert project.split()[-1] == "."  # the service needs no extra
    assert instructions("USER") == ["loopwm"]
    assert DOCKERFILE.index("\nUSER") < DOCKERFILE.index("\nENTRYPOINT")
    (base,) = instructions("FROM")
    version = re.fullmatch(r"python:3\.(\d+)-slim", base)
    assert version is not None
    assert int(version[1]) >= 11


def test_the_images_health_check_is_the_services(client, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # as containers are given one
    (told,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*\])$", DOCKERFILE, re.M)
    _, dash_c, code = json.loads(told)
    assert dash_c == "-c"
    check = compile(code.replace("127.0.0.1:8000", client.base_url.netloc.decode()), "HEALTHCHECK", "exec")
    exec(check, {})
    with pytest.raises(OSError, match="404"):
        exec(compile(code.replace("127.0.0.1:8000/health", f"{client.base_url.netloc.decode()}/none"), "", "exec"), {})


def test_worlds_lie_where_image_and_unit_may_write():
    args = build_parser().parse_args(entrypoint()[2:])
    assert [str(args.worlds_file.parent)] == instructions("VOLUME") == instructions("WORKDIR")[-1:]
    args = build_parser().parse_args(shlex.split(unit("ExecStart"))[2:])
    assert args.worlds_file.parent.name == unit("StateDirectory")
    assert int(unit("TimeoutStopSec")) > args.grace + server.FLUSH_SECONDS + server.ARRIVAL_SECONDS
    assert f"\nListenStream={args.host}:{args.port}\n" in (ROOT / "deploy/loopwm.socket").read_text(encoding="utf-8")


def test_the_packaged_checkpoint_and_the_starts_are_part_of_the_package():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    assert PACKAGED == ROOT / "loopwm/pretrained"
    for name in (
        "pretrained/model-00001-of-00002.safetensors",
        "pretrained/config.json",
        "worlds/data/scienceworld.jsonl.gz",
    ):
        assert (ROOT / "loopwm" / name).exists()
        assert any(fnmatch(name, pattern) for pattern in data["loopwm"])


def test_command_serve_runs_the_module(monkeypatch):
    calls: list[list[str]] = []
    for module in ("serve.start", "serve.play", "serve.mcp_command"):
        monkeypatch.setattr(f"{module}.main", lambda arguments, module=module: calls.append([module, *arguments]) or 3)
    assert command.main(["serve", "--port", "0"]) == 3
    assert command.main(["play", "--example", "find/0006"]) == 3
    assert command.main(["mcp", "--http", "1"]) == 3
    assert calls == [
        ["serve.start", "--port", "0"],
        ["serve.play", "--example", "find/0006"],
        ["serve.mcp_command", "--http", "1"],
    ]
    module, _, function = PROJECT["project"]["scripts"]["loopwm"].partition(":")
    assert (module, function) == (command.__name__, command.run.__name__)
