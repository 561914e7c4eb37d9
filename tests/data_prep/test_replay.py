"""What is read by playing again: hidden states, and what would have followed another action."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_prep import counterfactual, windows
from data_prep.__main__ import main
from data_prep.collect import play
from data_prep.environments.scienceworld import ScienceWorld
from data_prep.episodes import Episode, write_episodes
from data_prep.errors import DataError
from data_prep.policies import POLICIES
from data_prep.replay import replay
from data_prep.windows import Cut, cut_window, read_windows

TASK = "find-non-living-thing"
ROOMS = ("art studio", "bathroom", "bedroom", "foundry", "greenhouse", "hallway", "kitchen", "living room", "workshop")


@pytest.fixture(scope="module")
def episode(simulator: ScienceWorld) -> Episode:
    return play(simulator, POLICIES["gold"], TASK, 3, "train", 160, Random(0))


@pytest.fixture
def shared_simulator(simulator: ScienceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the session's simulator instead of starting one, and leave it running."""
    monkeypatch.setattr(ScienceWorld, "close", lambda self: None)
    for module in (windows, counterfactual):
        monkeypatch.setattr(module, "make_environment", lambda name: simulator)


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        ("measure-melting-point-unknown-substance", ["unknown substance C: melting point 115, conducts electricity"]),
        ("test-conductivity-of-unknown-substances", ["melting point 1000, does not conduct electricity"]),
        ("inclined-plane-friction-unnamed-surfaces", ["material C surface: angle 45, friction 0.4", "friction 0.9"]),
        ("mendelian-genetics-unknown-plant", ["unknown E: blue seed color is dominant, brown seed color is recessive"]),
    ],
)
def test_the_hidden_state_shows_every_room_and_what_the_task_hides(
    simulator: ScienceWorld, task: str, facts: list[str]
) -> None:
    simulator.reset(task, 0)
    state = simulator.hidden_state() or ""
    assert [room for room in ROOMS if f"This room is called the {room}." not in state] == []
    assert "the outside" in state
    assert [fact for fact in facts if fact not in state] == []


def test_the_hidden_state_is_that_of_now_and_reading_it_costs_no_step(
    simulator: ScienceWorld, episode: Episode
) -> None:
    states = []
    for found in replay(simulator, TASK, 3, episode.steps):
        states.append(simulator.hidden_state())
        assert found.look is not None
        assert found.look.strip() in (states[-1] or "")
    assert states[0] == episode.hidden_state
    assert len(set(states)) > 1


def test_a_history_that_never_was_is_refused(simulator: ScienceWorld, episode: Episode) -> None:
    broken = [*episode.steps[:2], *episode.steps[3:]]
    with pytest.raises(DataError, match=f"{TASK}, variation 3, step 2: the simulator answers"):
        list(replay(simulator, TASK, 3, broken))


@pytest.mark.usefixtures("shared_simulator")
def test_windows_carry_the_hidden_state_of_their_now(simulator: ScienceWorld, episode: Episode, tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode])
    out = tmp_path / "w.jsonl"
    options = ["--count", "2", "--horizon", "2", "--hidden-state", "--out", str(out)]
    assert main(["windows", "--episodes", str(tmp_path / "e.jsonl"), *options]) == 0
    for window in read_windows(out):
        *_, now = replay(simulator, TASK, 3, episode.steps[: len(window["history"])])
        assert now.look == window["look"]
        assert window["hidden_state"] == simulator.hidden_state()


@pytest.mark.usefixtures("shared_simulator")
def test_a_counterfact_differs_in_one_earlier_action_and_in_the_answer(
    simulator: ScienceWorld, episode: Episode, tmp_path: Path
) -> None:
    source, out = tmp_path / "w.jsonl", tmp_path / "pairs.jsonl"
    cuts = [Cut(episode, now, f"w/{now}") for now in range(3)]
    windows.write_windows(source, [cut_window(cut, 3, None) for cut in cuts])
    assert main(["counterfactual", "--windows", str(source), "--count", "2", "--out", str(out)]) == 0
    found = read_windows(out)
    assert len(found) == 4
    for fact, other in zip(found[::2], found[1::2], strict=True):
        assert (fact["id"][-5:], other["id"]) == ("/fact", fact["id"][:-4] + "counterfact")
        assert {k for k in fact if fact[k] != other[k]} <= {"id", "actions", "observations", "rewards", "dones"}
        assert [a == b for a, b in zip(fact["actions"], other["actions"], strict=True)].count(False) == 1
        assert fact["actions"][-1] == other["actions"][-1]
        assert fact["observations"][-1] != other["observations"][-1]
        assert played(simulator, other) == (other["observations"], other["dones"])


def played(simulator: ScienceWorld, window: dict[str, Any]) -> tuple[list[str], list[bool]]:
    """What the simulator answers to the window's actions."""
    simulator.reset(window["task"], window["variation"])
    for step in window["history"][1:]:
        simulator.step(step["action"])
    steps = [simulator.step(action) for action in window["actions"]]
    return [step.observation for step in steps], [step.done for step in steps]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a window"),
        ("[]", "line 1: id: missing"),
        ('{"id": "a"}', "line 1: env: missing"),
        (json.dumps({"id": "a", "env": "chess", "task": "t", "variation": 0, "history": [], "actions": ["a", "b"],
                     "observations": []}), "unknown 'chess'"),
    ],
)  # fmt: skip
def test_files_without_windows_are_refused_in_one_line(
    tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.jsonl").write_text(line)
    options = ["--count", "1", "--out", str(tmp_path / "pairs.jsonl")]
    assert main(["counterfactual", "--windows", str(tmp_path / "w.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
