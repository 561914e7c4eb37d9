"""Start vLLM's server for a test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

MODEL = "tiny"
START_LIMIT_S = 1800
"""A server on a busy machine may take ten minutes; one that has ended is reported at once."""


@contextmanager
def vllm_server(checkpoint: Path, log: Path, max_length: int, **overrides: int) -> Iterator[str]:
    """Yield the URL of a server of a checkpoint, in float32. overrides: of its configuration."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(max_length), "--enforce-eager", "--hf-overrides", json.dumps(overrides)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **offline, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{log.read_text()[-8000:]}")
