"""vLLM's own benchmark, in the environment of `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import MODEL, TOKENIZER

pytestmark = pytest.mark.conformance

REQUESTS, WRITTEN = 6, 8


def test_vllm_bench_serve_ends_with_no_failed_request(base, tmp_path):
    done = subprocess.run(
        [
            sys.executable, str(Path(__file__).with_name("vllm_bench.py")),
            "--base-url", base.removesuffix("/v1"), "--model", MODEL, "--tokenizer", TOKENIZER,
            "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", str(WRITTEN),
            "--ignore-eos", "--num-prompts", str(REQUESTS), "--max-concurrency", "3",
            "--save-result", "--result-dir", str(tmp_path), "--result-filename", "report.json",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] == REQUESTS * WRITTEN
