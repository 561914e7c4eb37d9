"""Unchanged benchmarks and harnesses come to their end, without a key and without a failed request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import MODEL, TOKENIZER

pytestmark = pytest.mark.conformance

REQUESTS, READ, WRITTEN = 6, 32, 8


def run(*command: str) -> None:
    """Runs a module of this environment, which must find no key and end well."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_guidellm_ends_with_no_failed_request(base, tmp_path):
    report = tmp_path / "report.json"
    target = base.removesuffix("/v1")
    run(
        "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={target},model={MODEL},request_format=/v1/completions",
        "--profile", "kind=concurrent,streams=3",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={READ},output_tokens={WRITTEN}",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * WRITTEN


def test_lm_eval_scores_and_generates_without_a_key(base, tmp_path):
    ask = {
        "model": MODEL, "base_url": f"{base}/completions", "tokenizer": TOKENIZER, "tokenizer_backend": "huggingface",
        "max_length": 4096, "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    tasks = [f"loopwm_scienceworld-500_snapshot_{kind}_h1" for kind in ("loss", "observation")]
    run(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in ask.items()),
        "--include_path", "eval/lm_eval_tasks", "--limit", "3", "--tasks", ",".join(tasks),
        "--output_path", str(tmp_path),
    )  # fmt: skip
    (report,) = Path(tmp_path).rglob("results_*.json")
    loss, observation = (json.loads(report.read_text())["results"][task] for task in tasks)
    assert 0 < loss["nats,none"] < 20, "a trained model finds what really happens likely"
    assert observation["f1,none"] > 0.9
