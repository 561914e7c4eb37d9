"""The tasks of lm-evaluation-harness: what is written, and what it calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.models.fewshot import load_shots
from eval.scores.metrics import score_item
from eval.scores.suites import load_suite, suite_names
from lab.__main__ import main
from lab.lm_eval import documents
from lab.lm_eval.documents import MARK as EXAMPLE_END
from lab.lm_eval.documents import read_continuation
from loopwm.records.template import CONTEXT_LIMIT, END, render_prompt, window_context
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.tokenizer import load_tokenizer
from tests.fixtures.prompts import as_text
from tests.fixtures.windows import MakeWindow, WriteSuite

FUNCTION = re.compile(r"!function lab\.lm_eval\.documents\.(\w+)")


def write_tasks(out: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["lm-eval-tasks", "--out", str(out), *options]) == 0
    return [yaml.safe_load(FUNCTION.sub(r"\1", path.read_text())) for path in sorted(out.iterdir())]


def test_every_committed_suite_has_its_tasks(tmp_path: Path) -> None:
    found = {task["task"] for task in write_tasks(tmp_path / "tasks", "--horizons", "1,5")}
    assert found == {
        f"loopwm_{suite}_{context}_{kind}_h{horizon}"
        for suite in suite_names()
        for context in ("observed", "snapshot")
        for kind in ("observation", "loss", "prompted")
        for horizon in (1, 5)
    }


def test_a_task_loads_what_it_names(suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the harness does it: custom_dataset with dataset_kwargs and keywords of its own, from any folder."""
    monkeypatch.chdir(suite_path.parent)
    options = ["--suites", suite_path.name, "--contexts", "snapshot", "--horizons", "2"]
    tasks = write_tasks(tmp_path / "tasks", *options)
    monkeypatch.chdir("/")
    assert [task["task"] for task in tasks] == [
        f"loopwm_suite_snapshot_{kind}_h2" for kind in ("loss", "observation", "prompted")
    ]
    for task in tasks:
        splits = getattr(documents, task["custom_dataset"])(**task["dataset_kwargs"], version=1.0)
        fields = splits[task["test_split"]].column_names
        assert {task["doc_to_text"], task["doc_to_target"]} <= set(fields)
        assert callable(getattr(documents, task["process_results"]))
        assert len(splits["test"]) == 40
        assert task["num_fewshot"] == len(splits.get("examples", ()))


def test_a_document_of_the_template_is_a_window_at_one_horizon(suite_path: Path) -> None:
    found = documents.load_template(str(suite_path), "snapshot", 3, version=1)["test"]
    slots = load_checkpoint(documents.SHIPPED)[0].config.slots
    for window, document in zip(load_suite(str(suite_path)).windows, found, strict=True):
        assert document["prompt"] == render_prompt(window_context(window, "snapshot"), window["actions"][:3], slots)
        assert document["observation"] == window["observations"][2]
        assert document["target"] == window["observations"][2] + END


@pytest.mark.parametrize("shots", [0, 2])
def test_a_prompted_document_is_asked_as_an_endpoint_is(suite_path: Path, tmp_path: Path, shots: int) -> None:
    """Put together as the harness does: description, examples and question with their delimiters."""
    options = ["--suites", str(suite_path), "--contexts", "observed", "--horizons", "3", "--shots", str(shots)]
    *_, task = write_tasks(tmp_path / "tasks", *options)
    splits = documents.load_prompted(**task["dataset_kwargs"])
    before = task["description"]
    for example in splits["examples"]:
        before += example["prompt"] + task["target_delimiter"] + example["target"] + task["fewshot_delimiter"]
    windows = load_suite(str(suite_path)).windows
    prompt = load_shots(windows, None, shots, "observed", [3])
    for window, document in zip(windows, splits["test"], strict=True):
        messages = prompt.messages(window, window_context(window, "observed"), "observed", 3)
        assert before + document["prompt"] == as_text(messages)


def test_a_prompt_that_is_too_long_loses_its_oldest_steps(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    history = [(None, "Start."), *((f"action {i}", "a long observation " * 8) for i in range(120))]
    (document,) = documents.load_template(str(write_suite([make_window("w", history)])), "observed", 5)["test"]
    tokens = len(load_tokenizer()(document["prompt"])["input_ids"])
    filled = LoopWMConfig.from_pretrained(documents.SHIPPED).context_tokens
    assert filled - 100 < tokens <= filled <= CONTEXT_LIMIT
    assert "Start." in document["prompt"]
    assert "action 119" in document["prompt"]
    assert "action 0<" not in document["prompt"]


@pytest.mark.parametrize("after", ["", "\n###\n\nGoal: another"])
def test_generations_score_as_in_this_harness(suite_path: Path, after: str) -> None:
    document = documents.load_template(str(suite_path), "snapshot", 1)["test"][0]
    said = "You move to the kitchen."
    scores = score_item("scienceworld", said, document["observation"])
    found = documents.score_generation(document, [said + after])
    assert found == {name: scores[name] for name in ("em", "f1", "bleu4", "entity_recall")}
    assert 0 < found["f1"] < 1


@pytest.mark.parametrize("results", [[(-2.5, True)], (-2.5, True)])
def test_the_loss_is_what_the_target_lacks_in_likelihood(suite_path: Path, results: object) -> None:
    document = documents.load_template(str(suite_path), "snapshot", 1)["test"][0]
    found = documents.score_target(document, results)  # type: ignore[arg-type]
    size = len("You move to the hallway.")
    assert found == {"nats": 2.5, "greedy": 1.0, "bits_per_byte": (-2.5, size)}


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({}, ["--suites", "nowhere"], "--suite: must be a file or a committed suite"),
        ({}, ["--suites", "{suite}", "{suite}"], "--suites: {suite}: another suite goes by the same name"),
        ({}, ["--suites", "{suite}", "--contexts", "full"], "window second: hidden_state: is null"),
        ({}, ["--suites", "{suite}", "--horizons", "6"], "window second: actions: has 5"),
        ({}, ["--suites", "{suite}", "--shots", "9"], "--shots: 9 examples of 'scienceworld' are asked for"),
        ({"env": "alfworld"}, ["--suites", "{suite}"], "--suites: 'suite' is of several environments: alfworld, sci"),
        ({}, ["--suites", "{suite}", "--out", "{there}"], "--out: {there} is there already"),
    ],
)
def test_what_the_harness_could_not_load_is_not_written(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    fields: dict[str, str], options: list[str], named: str,
) -> None:  # fmt: skip
    suite = write_suite([make_window("second", **fields), make_window("third")])
    (tmp_path / "there").mkdir()
    places = {"suite": str(suite), "there": str(tmp_path / "there")}
    before = sorted(tmp_path.rglob("*"))
    arguments = ["lm-eval-tasks", "--out", str(tmp_path / "out"), *(option.format(**places) for option in options)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {named.format(**places)}")
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_continuation_is_read_up_to_the_mark_that_ends_examples(make_window: MakeWindow) -> None:
    shots = load_shots([make_window()], None, 1, "observed", [1])
    text = as_text(shots.messages(make_window(), window_context(make_window(), "observed"), "observed", 1))
    assert text.count(f"\n{EXAMPLE_END}\n") == 1
    assert text.endswith("Action: go to hallway\nObservation:")
    assert read_continuation(f" You see:\n\ta table\n{EXAMPLE_END}\n\nGoal: more") == "You see:\n\ta table"
