"""What is read by playing again: hidden states."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from data_prep import windows
from data_prep.__main__ import main
from data_prep.environments.scienceworld.environment import PROBE, ScienceWorld
from data_prep.policies import replay
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError
from tests.data_prep.test_windows import read_windows
from tests.fixtures.episodes import play_once

TASK = "find-non-living-thing"
ROOMS = ("art studio", "bathroom", "bedroom", "foundry", "greenhouse", "hallway", "kitchen", "living room", "workshop")


@pytest.fixture(scope="module")
def episode(simulator: ScienceWorld) -> Episode:
    return play_once(simulator, "gold", TASK, 3, "train", 160)


@pytest.fixture
def shared_simulator(simulator: ScienceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the session's simulator instead of starting one, and leave it running."""
    monkeypatch.setattr(ScienceWorld, "close", lambda self: None)
    monkeypatch.setattr(windows, "make_environment", lambda name: simulator)


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


def test_the_hidden_state_tells_what_looking_does_not(simulator: ScienceWorld) -> None:
    def lines_after(*actions: str) -> set[str]:
        for action in actions:
            simulator.step(action)
        return set((simulator.hidden_state() or "").splitlines())

    simulator.reset("boil", 0)
    lines = lines_after("open door to kitchen", "go to kitchen")
    held = "a closed cupboard in kitchen holds: "
    assert [line for line in lines if line.startswith(held) and "a metal pot (containing nothing)" in line]
    assert [line for line in lines if line.startswith("temperature 10: ") and "thermometer" in line.split(": ")[1]]
    assert not [line for line in lines_after("open cupboard") if line.startswith(held)]
    assert "waiting for a number" not in lines
    simulator.reset("inclined-plane-determine-angle", 0)
    planes = [line for line in lines_after() if line.startswith("inclined plane") and ": angle " in line]
    assert len(planes) == 2
    way = ["open door to workshop", "go to workshop", f"move block to {planes[0].split(':')[0]}", "wait1"]
    assert [line for line in lines_after(*way) if "block on inclined plane" in line and line.endswith(" percent down")]


def test_a_score_below_zero_ends_the_episode_as_in_the_package(simulator: ScienceWorld) -> None:
    simulator.reset("boil", 0)
    for action in ("open door to kitchen", "go to kitchen"):
        assert not simulator.step(action).done
    end = simulator.step("focus on sink")
    assert (end.score, end.done) == (-100, True)


def test_a_path_is_found_again_after_straying(simulator: ScienceWorld) -> None:
    simulator.reset("boil", 0)
    for action in ("open door to kitchen", "go to kitchen", "open cupboard", "pick up metal pot"):
        simulator.step(action)
    mark = simulator.mark()
    astray = ["move metal pot to stove", "activate stove", "open fridge", "pick up lighter", "open door to outside"]
    for action in (*astray, "go to outside", "pick up axe", "go to kitchen", "close door to hallway", "go to outside"):
        assert "No known action" not in simulator.step(action).observation
    for action in simulator.plan(mark, ()):
        simulator.step(action)
    assert simulator.plan(mark, ["then on"]) == ["then on"]
    assert simulator.mark() == mark


@pytest.mark.parametrize("name", ["Probe", "Names"])
def test_our_classes_are_compiled_from_their_sources(name: str) -> None:
    folder = PROBE / "loopwm"
    assert (folder / f"{name}.sha256").read_text().strip() == sha256((folder / f"{name}.java").read_bytes()).hexdigest()


def test_a_history_that_never_was_is_refused(simulator: ScienceWorld, episode: Episode) -> None:
    broken = [*episode.steps[:2], *episode.steps[3:]]
    with pytest.raises(InputError, match=f"{TASK}, variation 3, step 2: the simulator answers"):
        list(replay(simulator, TASK, 3, broken))


@pytest.mark.usefixtures("shared_simulator")
def test_windows_carry_the_hidden_state_of_their_now(simulator: ScienceWorld, episode: Episode, tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl", [episode])
    out = tmp_path / "w.jsonl.gz"
    options = ["--count", "2", "--horizon", "2", "--hidden-state", "--out", str(out)]
    assert main(["windows", "--episodes", str(tmp_path / "e.jsonl"), *options]) == 0
    for window in read_windows(out):
        *_, now = replay(simulator, TASK, 3, episode.steps[: len(window["history"])])
        assert now.look == window["look"]
        assert window["hidden_state"] == simulator.hidden_state()
