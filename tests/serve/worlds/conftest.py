"""World sessions are tested on a service of the model with every head."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.fixture(scope="session")
def client(worlds_client: httpx.Client) -> httpx.Client:
    return worlds_client


@pytest.fixture(scope="session")
def model(library: Any) -> Any:
    return library.model
