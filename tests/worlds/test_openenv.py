"""The imagined environment behind OpenEnv's WebSocket, driven by OpenEnv's own client."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="make test-openenv installs it")

import uvicorn
import yaml
from fastapi import FastAPI
from openenv.cli._validation import validate_running_environment
from openenv.core.generic_client import GenericEnvClient
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser

from loopwm.records.template import Context
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from tests.fixtures.models import random_model

PACKAGE = Path(__file__).parents[2] / "deploy" / "openenv"
sys.path.insert(0, str(PACKAGE))

from server.environment import SESSION_TIMEOUT, create_app, main  # noqa: E402

STARTS = [Context(f"find a tree in place {i}", f"This is the hall of place {i}.") for i in range(4)]
ACTIONS = ("wait", "look around", "go to the other hall")


@pytest.fixture(scope="module")
def model(tokenizer) -> WorldModel:
    return WorldModel(random_model(), tokenizer)


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    with running(create_app(lambda: LocalWorlds(model, max_new_tokens=12), STARTS, max_steps=len(ACTIONS))) as url:
        yield url


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The address of a server."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def play(url: str, seed: int) -> list[Any]:
    async with GenericEnvClient(base_url=url) as env:
        start = await env.reset(seed=seed)
        told = [(start.observation["text"], False)]
        for action in ACTIONS:
            result = await env.step({"text": action})
            told.append((result.observation["text"], result.done))
        return [*told, (await env.state())["step_count"]]


def test_sessions_at_once_are_what_they_are_alone_and_end_after_max_steps(url):
    async def together() -> list[list[Any]]:
        return await asyncio.gather(*(play(url, seed) for seed in range(6)))

    async def one_by_one() -> list[list[Any]]:
        return [await play(url, seed) for seed in range(6)]

    found = asyncio.run(together())
    assert found == asyncio.run(one_by_one())
    assert len({session[0][0] for session in found}) > 1
    assert [done for _, done in found[0][:-1]] == [False, False, False, True]
    assert found[0][-1] == len(ACTIONS)


def test_a_session_is_the_world_model_step_by_step(url, model):
    found = asyncio.run(play(url, 3))
    (start,) = [context for context in STARTS if context.observation == found[0][0]]
    world = model.encode([start])
    for action, (text, _) in zip(ACTIONS, found[1:], strict=False):
        world = model.advance(world, [action])
        assert text == model.decode(world, 12)[0]


def test_an_action_that_is_none_is_refused_and_the_session_goes_on(url):
    async def session() -> int:
        async with GenericEnvClient(base_url=url) as env:
            await env.reset(seed=0)
            with pytest.raises(Exception, match="Invalid message"):
                await env.step({"text": ""})
            await env.step({"text": "wait"})
            state: dict[str, int] = await env.state()
            return state["step_count"]

    assert asyncio.run(session()) == 1


def test_a_missing_file_is_one_line_and_status_2(capsys, tmp_path):
    assert main(["--starts", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_session_that_is_silent_for_too_long_gives_its_place_to_another(model):
    app = create_app(lambda: LocalWorlds(model, max_new_tokens=4), STARTS, sessions=1, session_timeout=0.5)

    async def session(url: str) -> None:
        async with GenericEnvClient(base_url=url) as env:
            await env.reset(seed=0)
            with pytest.raises(Exception, match=r"(?i)capacity|session"):
                await play(url, 0)
            for _ in range(60):  # OpenEnv looks every five seconds
                await asyncio.sleep(1)
                with suppress(Exception):
                    if await play(url, 0):
                        return
            raise AssertionError("the silent session keeps its place")

    with running(app) as url:
        asyncio.run(session(url))


def test_openenvs_own_validation_finds_no_fault_with_server_and_description(url):
    report = validate_running_environment(url.replace("ws://", "http://"))
    assert report["passed"], report["criteria"]
    manifest = OpenEnvYamlParser().parse(PACKAGE)
    assert (manifest.name, manifest.resources.episode_timeout_s) == ("loopwm", SESSION_TIMEOUT)


def test_the_description_names_a_server_of_the_packaged_checkpoint():
    described = yaml.safe_load((PACKAGE / "openenv.yaml").read_text())
    module, _, name = described["app"].partition(":")
    app = getattr(importlib.import_module(module), name)
    with running(app) as url:
        (start, *steps, count) = asyncio.run(play(url, 0))
    assert start[0]
    assert count == len(steps) == len(ACTIONS)
