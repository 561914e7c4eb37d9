"""Worlds as tools of the Model Context Protocol, over the real app, with the package's own client."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest
from mcp import Client as McpClient
from mcp import StdioServerParameters

from loopwm.records.refusals import is_accepted
from loopwm.records.template import Context, Transition
from loopwm.text.world import WorldModel
from loopwm.worlds.http import Client
from serve.__main__ import main
from serve.mcp import build_server

TOKENS = 12
"""Most tokens decoded: random models seldom come to an end."""
START = {"goal": "Your task is to boil water.", "observation": "This room is called the kitchen."}
SEEN = Context(START["goal"], START["observation"])

Tools = Callable[..., Any]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("serve.http.worlds.DEFAULT_MAX_TOKENS", TOKENS)


def called(server: Any, work: Callable[[McpClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with McpClient(server) as client:
            return await work(client)

    return anyio.run(run)


@pytest.fixture
def tools(worlds_client: httpx.Client) -> Tools:
    """Calls a tool; returns its result, or the text of its error."""
    server = build_server(Client(str(worlds_client.base_url)))

    def call(name: str, **arguments: Any) -> Any:
        result = called(server, lambda client: client.call_tool(name, arguments))
        return (
            result.content[0].text
            if result.is_error
            else result.structured_content.get("result", result.structured_content)
        )

    return call


def decoded(library: WorldModel, context: Context, *actions: str) -> str:
    world = library.encode([context])
    for action in actions:
        world = library.advance(world, [action])
    return library.decode(world, TOKENS)[0]


def count_worlds(client: httpx.Client) -> int:
    return len(client.get("/v1/worlds").json()["data"])


def test_imagine_goes_on_after_earlier_steps(tools, library):
    world = tools("create_world", **START)["id"]
    first, second = tools("imagine", world=world, actions=["open door", "look around"])
    assert first["observation"] == decoded(library, SEEN, "open door")
    assert second["observation"] == decoded(library, SEEN, "open door", "look around")
    chance = library.predictions(library.advance(library.encode([SEEN]), ["open door"])).acceptance
    assert (first["action"], first["refused"]) == ("open door", not is_accepted(first["observation"], chance.item()))
    (third,) = tools("imagine", world=world, actions=["wait"])
    assert third["observation"] == decoded(library, SEEN, "open door", "look around", "wait")


def test_actions_are_imagined_alone_and_leave_the_world(tools, library, worlds_client):
    world = tools("create_world", **START, history=[{"action": "wait", "observation": "Nothing."}])["id"]
    before = count_worlds(worlds_client)
    after_wait = Context(*START.values(), (Transition("wait", "Nothing."),))
    candidates = ["open door", "look around"]
    for _ in range(2):
        answers = tools("actions", world=world, candidates=candidates)
        assert [answer["observation"] for answer in answers] == [
            decoded(library, after_wait, action) for action in candidates
        ]
    assert count_worlds(worlds_client) == before


def test_compare_returns_the_lines_that_differ(tools, library):
    world = tools("create_world", **START)["id"]
    comparison = tools("compare", world=world, first=["open door"], second=["look around", "wait"])
    first = decoded(library, SEEN, "open door").splitlines()
    second = decoded(library, SEEN, "look around", "wait").splitlines()
    assert first != second
    assert not comparison["same"]
    assert comparison["first"]["lines"] == [line for line in first if line not in second]
    assert comparison["second"]["lines"] == [line for line in second if line not in first]
    same = tools("compare", world=world, first=["wait"], second=["wait"])
    assert (same["same"], same["first"]["lines"], same["second"]["lines"]) == (True, [], [])


def test_a_fork_and_its_world_change_independently(tools, library):
    world = tools("create_world", **START)["id"]
    fork = tools("fork", world=world)
    tools("imagine", world=world, actions=["open door"])
    assert tools("observe", world=fork, action="wait", observation="Nothing.") == fork
    (step,) = tools("imagine", world=fork, actions=["look around"])
    after_wait = Context(*START.values(), (Transition("wait", "Nothing."),))
    assert step["observation"] == decoded(library, after_wait, "look around")


def test_a_deleted_world_is_told_in_one_line(tools):
    world = tools("create_world", **START)["id"]
    assert tools("delete_world", world=world) == world
    assert "world" in tools("imagine", world=world, actions=["wait"])
    assert "\n" not in tools("imagine", world=world, actions=["wait"])


@pytest.mark.parametrize("plan", [[], [" "]])
def test_a_plan_without_an_action_is_refused_by_name(tools, plan, worlds_client):
    world = tools("create_world", **START)["id"]
    before = count_worlds(worlds_client)
    assert "actions" in tools("compare", world=world, first=["wait"], second=plan)
    assert tools("actions", world=world, candidates=[]).endswith(
        "candidates: must have at least 1 item, got none (status 400)"
    )
    assert count_worlds(worlds_client) == before


def test_an_agent_starts_the_command_itself(worlds_client, library):
    command = [*("-P", "-m", "loopwm", "mcp"), "--url", str(worlds_client.base_url)]
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))

    async def work(client: McpClient) -> Any:
        names = {tool.name for tool in (await client.list_tools()).tools}
        world = (await client.call_tool("create_world", START)).structured_content["id"]
        return names, await client.call_tool("imagine", {"world": world, "actions": ["open door"]})

    names, result = called(server, work)
    assert names == {"create_world", "imagine", "actions", "compare", "fork", "observe", "delete_world"}
    assert result.structured_content["result"][0]["observation"] == decoded(library, SEEN, "open door")


def test_a_service_that_is_down_is_named(capsys):
    assert main(["mcp", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9 does not answer")


def test_a_port_that_is_none_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["mcp", "--http", "99999"])
    assert capsys.readouterr().err == "error: argument --http: must be a port, 0 to 65535, got '99999'\n"
