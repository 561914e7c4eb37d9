"""Tools of the Model Context Protocol: imagined worlds for agents that call tools.

The id of a world is its only handle: no call depends on an earlier one of the same connection.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from loopwm.records.refusals import is_accepted
from loopwm.records.template import Transition
from loopwm.worlds.http import Client
from loopwm.worlds.protocol import WorldError

Json = dict[str, Any]

INSTRUCTIONS = """Imagine what a text environment answers, without running it. create_world takes the goal and what was
seen so far and returns an id, with which the other tools are called. Believe an observation as far as its trust, the
model's probability that it is exactly right. Worlds that are not used expire; delete_world frees one at once."""


@dataclass
class NewWorld:
    """A world's id, with which other tools are called. warnings: reasons to expect wrong answers."""

    id: str
    warnings: list[str]


@dataclass
class ImaginedStep:
    """An imagined action. reward in points; trust: probability that the observation is exactly right."""

    action: str
    observation: str
    refused: bool
    reward: float | None
    ends: bool
    trust: float | None


@dataclass
class Outcome:
    """Outcome of one of two plans: lines that only its last observation has, and the sum of its rewards."""

    lines: list[str]
    reward: float | None
    ends: bool
    trust: float | None


@dataclass
class Comparison:
    """Two plans from the same world. same: whether both end in the same observation."""

    same: bool
    first: Outcome
    second: Outcome


class WorldTools:
    """The tools; each calls the service. Raises ToolError, which an agent reads."""

    def __init__(self, client: Client) -> None:
        """Use the service's model. Raises WorldError."""
        self._client = client
        self._model = client.model()

    def create_world(self, goal: str, observation: str, history: list[Transition] | None = None) -> NewWorld:
        """Create a world. observation: the first one. history: the real steps taken since then."""
        steps = [asdict(step) for step in history or ()]
        body = {"model": self._model, "goal": goal, "observation": observation, "history": steps}
        world = self._call("POST", "worlds", body)
        return NewWorld(world["id"], world["warnings"])

    def imagine(self, world: str, actions: list[str]) -> list[ImaginedStep]:
        """Imagine actions one after another. The world advances: the next call continues after them."""
        body = {"actions": actions, "decode": "each", "step_id": uuid.uuid4().hex}
        return [_imagined(step) for step in self._call("POST", f"worlds/{world}/step", body)["steps"]]

    def actions(self, world: str, candidates: list[str]) -> list[ImaginedStep]:
        """Imagine each candidate alone, to choose between them. The world does not change."""
        reply = self._call("POST", f"worlds/{world}/actions", {"candidates": candidates})
        return [_imagined(step) for step in reply["data"]]

    def compare(self, world: str, first: list[str], second: list[str]) -> Comparison:
        """Imagine two plans, and return only what differs in their last observations. The world does not change."""
        plans = self._alternatives(world, (first, second))
        lines = [steps[-1]["observation"].splitlines() for steps in plans]
        changes = list(difflib.ndiff(*lines))
        outcomes = [_outcome(steps, changes, mark) for steps, mark in zip(plans, "-+", strict=True)]
        return Comparison(lines[0] == lines[1], *outcomes)

    def fork(self, world: str) -> str:
        """Copy a world and return the copy's id; the two change independently."""
        return self._forks(world, 1)[0]

    def observe(self, world: str, action: str, observation: str) -> str:
        """Append a real step after the last real one; imagined steps since then are dropped. Returns the world's id."""
        self._call("POST", f"worlds/{world}/observe", {"action": action, "observation": observation})
        return world

    def delete_world(self, world: str) -> str:
        """Delete a world and return its id."""
        self._call("DELETE", f"worlds/{world}")
        return world

    def _alternatives(self, world: str, plans: Sequence[Sequence[str]]) -> list[list[Json]]:
        """Imagine each plan in a fork of its own, and return its steps; only the last has an observation."""
        forks = self._forks(world, len(plans))
        try:
            steps = zip(forks, plans, strict=True)
            answers = self._batch([{"op": "step", "world": fork, "actions": list(plan)} for fork, plan in steps])
        finally:
            with suppress(ToolError):  # they expire
                self._batch([{"op": "delete", "world": fork} for fork in forks])
        for answer in answers:
            if "error" in answer:
                raise ToolError(answer["error"]["message"])
        return [answer["steps"] for answer in answers]

    def _forks(self, world: str, count: int) -> list[str]:
        return [fork["id"] for fork in self._call("POST", f"worlds/{world}/fork", {"count": count})["data"]]

    def _batch(self, requests: list[Json]) -> list[Json]:
        return [answer["body"] for answer in self._call("POST", "/worlds:batch", {"requests": requests})["data"]]

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        try:
            return self._client.call(method, path, body, repeatable="step_id" in (body or ()))
        except WorldError as error:
            raise ToolError(str(error)) from error


def _imagined(step: Json) -> ImaginedStep:
    text = step["observation"]
    refused = not is_accepted(text, step["acceptance"])
    return ImaginedStep(step["action"], text, refused, step["reward"], _ends(step), step["trust"])


def _outcome(steps: Sequence[Json], changes: Sequence[str], mark: str) -> Outcome:
    rewards = [step["reward"] for step in steps]
    reward = None if None in rewards else sum(rewards)
    lines = [line[2:] for line in changes if line.startswith(mark)]
    return Outcome(lines, reward, any(map(_ends, steps)), steps[-1]["trust"])


def _ends(step: Json) -> bool:
    return step["continuation"] is not None and step["continuation"] < 0.5


def build_server(client: Client) -> MCPServer:
    """Build the server of a service's worlds. Raises WorldError if the service does not answer."""
    tools = WorldTools(client)
    server = MCPServer("loopwm", instructions=INSTRUCTIONS, log_level="WARNING")  # else two lines a request
    for tool in (
        *(tools.create_world, tools.imagine, tools.actions, tools.compare),
        *(tools.fork, tools.observe, tools.delete_world),
    ):
        server.add_tool(tool)
    return server
