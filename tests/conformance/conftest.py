"""A server that runs already, in another environment: `make conformance` starts it and says where."""

from __future__ import annotations

import os

import pytest

MODEL = "loopwm-small"
TOKENIZER = "loopwm/pretrained"
"""For those who count tokens themselves."""


@pytest.fixture(scope="session")
def base() -> str:
    """Address of the API of a running service."""
    return os.environ["LOOPWM_BASE"] + "/v1"


@pytest.fixture
def messages() -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Your task is to boil water."},
        {"role": "assistant", "content": "This room is called the kitchen. In it, you see a stove and a cupboard."},
        {"role": "user", "content": "open cupboard"},
        {"role": "user", "content": "look around"},
    ]
