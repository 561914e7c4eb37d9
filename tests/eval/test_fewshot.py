"""What a general language model is shown."""

from __future__ import annotations

import json

import pytest

from eval.models.fewshot import INSTRUCTION, examples_path, load_shots
from eval.scores.suites import load_suite, suite_names
from loopwm.records.episodes import TRAIN_SPLITS
from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_KINDS, ContextKind, window_context
from tests.fixtures.windows import MakeWindow, WriteSuite

HORIZONS = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("env", ["scienceworld", "alfworld"])
def test_committed_examples_are_of_train_and_show_every_context(make_window: MakeWindow, env: str) -> None:
    for context_kind in CONTEXT_KINDS:
        shots = load_shots([make_window(env=env)], None, 8, context_kind, HORIZONS)
        assert {window["split"] for window in shots.examples[env]} <= set(TRAIN_SPLITS)


def test_committed_examples_share_no_episode_with_a_suite_but_those_to_tune_on() -> None:
    def starts(name: str) -> set[str]:
        windows = load_suite(name).windows
        return {json.dumps([w["task"], w.get("variation"), w["goal"], w["history"][0]]) for w in windows}

    examples = starts(str(examples_path("scienceworld"))) | starts(str(examples_path("alfworld")))
    assert len(examples) >= 12
    assert not any(starts(name) & examples for name in suite_names() if "-dev" not in name)


@pytest.mark.parametrize("context_kind", ["observed", "snapshot"])
def test_the_prompt_shows_what_the_context_shows_and_nothing_deferred(
    make_window: MakeWindow, context_kind: ContextKind
) -> None:
    window = make_window()
    shots = load_shots([window], None, 2, context_kind, HORIZONS)
    *_, last = shots.messages(window, window_context(window, context_kind), context_kind, 3)
    assert window["goal"] in last["content"]
    assert ("a red apple" in last["content"]) == (context_kind == "snapshot")
    assert ("open fridge" in last["content"]) == (context_kind == "observed")
    hidden = "Observation: (not shown)"
    end = ["Action: go to hallway", hidden, "Action: open door", hidden, "Action: look around"]
    assert last["content"].splitlines()[-5:] == end
    assert not any(observation in last["content"] for observation in window["observations"])


def test_examples_are_answered_at_the_horizon_asked_about(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    example = make_window("example", split="train", goal="An example.")
    shots = load_shots([make_window()], write_suite([example]), 1, "observed", HORIZONS)
    for k in HORIZONS:
        first, answer, _ = shots.messages(make_window(), window_context(make_window(), "observed"), "observed", k)
        assert first["content"].startswith(INSTRUCTION)
        assert first["content"].count("Action: ") == 1 + k
        assert answer["content"] == example["observations"][k - 1]


@pytest.mark.parametrize(
    ("fields", "shots", "named"),
    [
        ({"split": "test"}, 1, "split: must be train, got 'test'"),
        ({"split": "train"}, 2, "--shots: 2"),
        ({"look": None, "split": "train"}, 1, "look"),
    ],
)
def test_examples_that_will_not_do_are_refused(
    make_window: MakeWindow, write_suite: WriteSuite, fields: dict[str, str | None], shots: int, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        load_shots([make_window()], write_suite([make_window("x", **fields)]), shots, "snapshot", HORIZONS)
