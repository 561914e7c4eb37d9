"""First-token times are those of answers with text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from lab.benchmarks.serve_load import Load, run

WINDOW: dict[str, Any] = {"goal": "goal", "history": [{"observation": "room"}], "actions": ["wait"]}


def test_run_counts_answers_without_text_apart(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"choices": [{"delta": {"content": ""}}], "usage": {"completion_tokens": 1}}
    page = httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    async def measure() -> Load:
        async with httpx.AsyncClient(
            base_url="http://service", transport=httpx.MockTransport(lambda _: page)
        ) as client:
            load = Load(client, "model", [WINDOW], 1, None)
            await run(load, "chat", 1, [lambda: load.chat(WINDOW)])
        return load

    assert asyncio.run(measure()).results["load"][0]["without_text"] == 1
    assert capsys.readouterr().out.split(" | ")[4] == "-"
