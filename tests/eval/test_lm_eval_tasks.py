"""The tasks of lm-evaluation-harness, as it calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eval.lm_eval_tasks import generate, utils
from eval.metrics import score_item
from eval.windows import load_suite
from loopwm.text.checkpoint import load_checkpoint
from loopwm.text.format import CONTEXT_LIMIT, END, render_prompt, window_context
from loopwm.text.tokenizer import load_tokenizer
from tests.eval.conftest import MakeWindow, WriteSuite

FOLDER = Path(generate.__file__).parent


def test_the_committed_tasks_are_the_generated_ones() -> None:
    committed = {str(p.relative_to(FOLDER)): p.read_text() for p in FOLDER.glob("*/*.yaml")}
    assert committed == generate.task_files()
    names = [yaml.safe_load(text)["task"] for text in committed.values()]
    assert len(set(names)) == len(names)


def test_a_document_is_a_window_at_one_horizon(suite_path: Path) -> None:
    documents = utils.load(str(suite_path), "snapshot", 3, version=1)["test"]
    slots = load_checkpoint(utils.SHIPPED)[0].config.slots
    for window, document in zip(load_suite(str(suite_path)).windows, documents, strict=True):
        assert document["prompt"] == render_prompt(window_context(window, "snapshot"), window["actions"][:3], slots)
        assert document["observation"] == window["observations"][2]
        assert document["target"] == window["observations"][2] + END


def test_a_prompt_that_is_too_long_loses_its_oldest_steps(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    history = [(None, "Start."), *((f"action {i}", "a long observation " * 8) for i in range(120))]
    (document,) = utils.load(str(write_suite([make_window("w", history)])), "observed", 5)["test"]
    tokens = len(load_tokenizer()(document["prompt"])["input_ids"])
    assert CONTEXT_LIMIT - 100 < tokens <= CONTEXT_LIMIT
    assert "Start." in document["prompt"]
    assert "action 119" in document["prompt"]
    assert "action 0<" not in document["prompt"]


def test_generations_score_as_in_this_harness(suite_path: Path) -> None:
    document = utils.load(str(suite_path), "snapshot", 1)["test"][0]
    said = "You move to the kitchen."
    scores = score_item("scienceworld", said, document["observation"])
    found = utils.score_generation(document, [said])
    assert found == {name: getattr(scores, name) for name in ("em", "f1", "bleu4", "entity_recall")}
    assert 0 < found["f1"] < 1


@pytest.mark.parametrize("results", [[(-2.5, True)], (-2.5, True)])
def test_the_loss_is_what_the_target_lacks_in_likelihood(suite_path: Path, results: object) -> None:
    document = utils.load(str(suite_path), "snapshot", 1)["test"][0]
    found = utils.score_target(document, results)  # type: ignore[arg-type]
    size = len("You move to the hallway.")
    assert found == {"nats": 2.5, "greedy": 1.0, "bits_per_byte": (-2.5, size)}
