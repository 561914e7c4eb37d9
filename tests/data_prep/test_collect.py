from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep import collect, environments, plan
from data_prep.__main__ import main
from data_prep.plan import CollectionPlan
from loopwm.records.episodes import Step, read_episodes
from loopwm.records.files import line_files
from tests.fixtures.episodes import check_that_kills_change_nothing, contents
from tests.fixtures.toy import Toy, collect_toy

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
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path}/")
    assert error.endswith(": No space left on device; make room on the disk and rerun the command")
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
    assert "plan.json: seed: must be 0 as in the folder, got 1" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_gold_plays_a_variation_once_and_only_noise_repeats_it() -> None:
    for policy, expected in (("gold", 2), ("noisy-expert", 5)):
        chunks = plan.plan_chunks(CollectionPlan("toy", "test", policy, 5, 160, 0, ("run",)), Toy())
        variations = [v for chunk in chunks for v in chunk.variations]
        assert len(variations) == expected
        assert set(variations) == {25, 26}


def test_the_seed_chooses_the_variations() -> None:
    chosen = []
    for seed in (0, 0, 1):
        chunks = plan.plan_chunks(CollectionPlan("toy", "train", "gold", 5, 160, seed, ("run",)), Toy())
        chosen.append([chunk.variations for chunk in chunks])
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.usefixtures("toy")
def test_plays_of_a_variation_follow_one_another_each_with_chance_of_its_own(tmp_path: Path) -> None:
    chunks = plan.plan_chunks(CollectionPlan("toy", "test", "noisy-expert", 5, 160, 0, ("run",), plays=2), Toy())
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


@pytest.mark.usefixtures("toy")
def test_threads_play_worlds_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Toy):
        def step(self, action: str) -> Step:
            time.sleep(0.001)
            return super().step(action)

    plan = CollectionPlan("toy", "train", "noisy-expert", 25, 160, 0, ())
    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Slow)
    for threads in (1, 2):
        with ThreadPoolExecutor(threads) as executor:
            collect.collect(plan, tmp_path / str(threads), executor, slice(None))
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
    assert capsys.readouterr().err.count(": the environment has switched to another world\n") == 3


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
    assert f"error: {path}: must be a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy", "--split", "tset"], "--split: must be one of train, test, got 'tset'"),
        (["toy", "--split", "test", "--tasks", "swim"], "--tasks: must be some of walk, run, got 'swim'"),
        (["chess", "--split", "test"], "environment: must be one of "),
        (["toy", "--split", "test", "--policy", "expert"], "--policy: must be 'gold' in toy, got 'expert'"),
        (["toy", "--split", "test", "--shard", "3/2"], "--shard: must be i/n with 1 <= i <= n, got '3/2'"),
        (
            ["toy", "--split", "test", "--dask", "tcp://127.0.0.1:9"],
            "--dask: must be a scheduler, none answers at 'tcp://127.0.0.1:9'",
        ),
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


@pytest.mark.slow
def test_killed_and_restarted_yields_the_same_set(tmp_path: Path) -> None:
    plan = "scienceworld --split train --policy noisy-expert --episodes-per-task 11 --max-steps 3"
    options = [*plan.split(), "--tasks", TASK, "lifespan-longest-lived"]
    check_that_kills_change_nothing(options, tmp_path, seed=0)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["collect", "toy", "--split", "test", "--out", "o", name, "0"]
            for name in ("--workers", "--steps", "--plays")
        ),
        *(["windows", "--episodes", "e", "--count", "1", "--out", "o", name, "0"] for name in ("--count", "--horizon")),
    ],
)
def test_a_number_of_things_is_one_at_least(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}: must be a whole number >= 1, got '0'" in capsys.readouterr().err
