"""Commands and programs of the README and of docs/service.md and their shown outputs, against the real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MANUAL = (ROOT / "docs/service.md").read_text(encoding="utf-8")
SHOWN_PORT = "8000"


def block(page: str, language: str, containing: str) -> tuple[str, str]:
    """A page's code block in this language that holds a text, and the output block right after it."""
    inside = r"((?:(?!```).)*)"
    pattern = rf"```{language}\n{inside}```\s*```text\n{inside}```"
    (found,) = [(code, out) for code, out in re.findall(pattern, page, re.DOTALL) if containing in code]
    return found


def manual_blocks() -> list[tuple[str, str]]:
    """The manual's commands that show their output, in order."""
    return re.findall(r"```bash\n((?:(?!```).)*)```\s*```text\n((?:(?!```).)*)```", MANUAL, re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    command = [sys.executable, "-m", "serve", "--model", "loopwm/pretrained", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]  # printed when it listens; a server that ends closes the pipe
            yield str(httpx.URL(url).port)
        finally:
            server.terminate()


def run(command: list[str], code: str, port: str) -> str:
    environment = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [*command, code.replace(f":{SHOWN_PORT}", f":{port}")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.slow
def test_the_readmes_curl_prints_what_the_readme_shows(port):
    code, shown = block(README, "bash", "curl")
    assert run(["bash", "-c"], code, port) == shown.strip()


@pytest.mark.slow
def test_the_readmes_agent_prints_what_the_readme_shows():
    code, shown = block(README, "python", "LocalWorlds")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shown.strip()


@pytest.mark.slow
def test_the_manuals_client_prints_what_the_manual_shows(port):
    code, shown = block(MANUAL, "python", "openai")
    assert run([sys.executable, "-c"], code, port) == shown.strip()


@pytest.mark.slow
def test_the_manuals_script_prints_what_the_manual_shows(port, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    blocks = manual_blocks()
    assert len(blocks) == 10
    mark = "=== next ==="
    script = f"cd {tmp_path}\n" + f"echo '{mark}'\n".join(code for code, _ in blocks)
    printed = [out.strip() for out in run(["bash", "-c"], script, port).split(mark)]
    assert printed == [shown.strip() for _, shown in blocks]


def test_the_readmes_first_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    assert commands[:2] == ["serve", "test"]
    assert all(f"\n{command}:" in makefile for command in commands)


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 115  # the first screen and the table of pages by task take 40
