"""An unchanged agent framework imagines through `loopwm mcp`, which it starts itself."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")
pytest.importorskip("mcp")

from fastmcp.client.transports import StdioTransport
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel

pytestmark = pytest.mark.conformance


def returned(messages: Any) -> list[Any]:
    """Return what the tools have answered."""
    return [part.content for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]


def test_an_agent_creates_a_world_and_imagines_in_it(base):
    transport = StdioTransport(os.environ["LOOPWM_PYTHON"], ["-m", "loopwm", "mcp", "--url", base])

    def think(messages: Any, _: Any) -> ModelResponse:
        """Create a world, compare what two actions bring, take one, and tell what it saw: a language model's part."""
        answers = returned(messages)
        if not answers:
            start = {"goal": "Your task is to boil water.", "observation": "This room is called the kitchen."}
            return ModelResponse(parts=[ToolCallPart("create_world", start)])
        if len(answers) == 1:
            candidates = {"world": answers[0]["id"], "candidates": ["look around", "open cupboard"]}
            return ModelResponse(parts=[ToolCallPart("actions", candidates)])
        if len(answers) == 2:
            return ModelResponse(
                parts=[ToolCallPart("imagine", {"world": answers[0]["id"], "actions": ["look around"]})]
            )
        return ModelResponse(parts=[TextPart(json.dumps(answers[1:]))])

    agent = Agent(FunctionModel(think), toolsets=[MCPToolset(transport, init_timeout=120)])
    candidates, steps = json.loads(agent.run_sync("Boil water.").output)
    assert [candidate["action"] for candidate in candidates] == ["look around", "open cupboard"]
    assert [step["action"] for step in steps] == ["look around"]
    assert steps[0]["observation"] == candidates[0]["observation"] != ""
    assert 0 < steps[0]["trust"] <= 1
