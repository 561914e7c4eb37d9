"""Unchanged benchmarks and harnesses come to their end, without a key and without a failed request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.models.fewshot import INSTRUCTION, load_shots
from eval.models.options import DEFAULT_SHOTS
from eval.scores.suites import load_suite
from loopwm.records.template import window_context
from tests.conformance.conftest import MODEL, TOKENIZER
from tests.eval.mock_endpoint import MockEndpoint
from tests.fixtures.prompts import as_text

pytestmark = pytest.mark.conformance

REQUESTS, READ, WRITTEN = 6, 32, 8
SUITE = "scienceworld-500"


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


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """The tasks of a suite, as `python -m lab lm-eval-tasks` wrote them."""
    folder = tmp_path_factory.mktemp("made") / "tasks"
    run(
        "lab", "lm-eval-tasks", "--suites", SUITE, "--contexts", "snapshot", "--horizons", "1", "--out", str(folder)
    )  # fmt: skip
    return folder


def results_of(folder: Path) -> dict[str, dict[str, float]]:
    (report,) = folder.rglob("results_*.json")
    return json.loads(report.read_text())["results"]


def test_lm_eval_asks_another_model_as_this_harness_does(tasks, tmp_path):
    """A chat model and one that continues text; both know the answers."""
    name = f"loopwm_{SUITE}_snapshot_prompted_h1"
    windows = load_suite(SUITE).windows[:2]
    shots = load_shots(windows, None, DEFAULT_SHOTS, "snapshot", [1])
    wanted = [shots.messages(window, window_context(window, "snapshot"), "snapshot", 1) for window in windows]
    asked = []
    mock = MockEndpoint(lambda body: asked.append(body["messages"]) or windows[len(asked) - 1]["observations"][0])
    run(
        "lm_eval", "run", "--model", "local-chat-completions",
        "--model_args", f"model=m,base_url={mock.url}/chat/completions,num_concurrent=1,max_retries=1",
        "--apply_chat_template", "--fewshot_as_multiturn", "true", "--include_path", str(tasks), "--limit", "2",
        "--tasks", name, "--output_path", str(tmp_path),
    )  # fmt: skip
    mock.close()
    assert results_of(tmp_path)[name]["em,none"] == 1
    for (told, *turns), messages in zip(asked, wanted, strict=True):
        lead = messages[0]["content"].removeprefix(INSTRUCTION)
        assert (told["role"], told["content"].strip()) == ("system", INSTRUCTION)
        questions = [{**m, "content": f"{m['content']}\nObservation:"} if m["role"] == "user" else m for m in messages]
        assert turns == [{**questions[0], "content": f"{lead.strip()}\nObservation:"}, *questions[1:]]

    from lm_eval.tasks import TaskManager  # here alone: the environment of `make test` collects this file without it

    task = TaskManager(include_path=str(tasks), include_defaults=False).load(name)["tasks"][name]
    for document, messages in zip(task.test_docs(), wanted, strict=False):
        assert task.fewshot_context(document, DEFAULT_SHOTS) == as_text(messages)


def test_lm_eval_scores_and_generates_without_a_key(base, tasks, tmp_path):
    ask = {
        "model": MODEL, "base_url": f"{base}/completions", "tokenizer": TOKENIZER, "tokenizer_backend": "huggingface",
        "max_length": 4096, "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    names = [f"loopwm_{SUITE}_snapshot_{kind}_h1" for kind in ("loss", "observation")]
    run(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in ask.items()),
        "--include_path", str(tasks), "--limit", "3", "--tasks", ",".join(names),
        "--output_path", str(tmp_path),
    )  # fmt: skip
    loss, observation = (results_of(tmp_path)[name] for name in names)
    assert 0 < loss["nats,none"] < 20, "a trained model finds what really happens likely"
    assert observation["f1,none"] > 0.9
