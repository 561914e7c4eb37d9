"""Which windows are seen: against a slow search, and in results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from eval.__main__ import main
from eval.models.retrieve import Retrieve
from eval.scores.seen import load_table
from eval.scores.suites import load_suite
from lab.__main__ import main as lab_main
from lab.data.build_seen import build_tables
from loopwm.records.episodes import parse_episode
from loopwm.records.training_episodes import FILE, TrainingEpisodes, episode_hash
from loopwm.records.windows import Window
from tests.fixtures.models import random_model, save_checkpoint
from tests.fixtures.windows import MakeWindow, WriteSuite, episode


def stands_in(window: Window, k: int, episodes: list[str]) -> bool:
    """Whether some episode has the window's last observation, its first k actions and the answer in a row."""
    for line in episodes:
        steps = json.loads(line)["steps"]
        for now in range(len(steps) - k):
            if (
                steps[now]["observation"].strip() == window["history"][-1]["observation"].strip()
                and [step["action"] for step in steps[now + 1 : now + 1 + k]] == window["actions"][:k]
                and steps[now + k]["observation"].strip() == window["observations"][k - 1].strip()
            ):
                return True
    return False


def test_a_window_is_seen_where_a_search_through_every_episode_finds_it(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    rng = Random(0)

    def some(length: int) -> list[tuple[str, str]]:
        return [(rng.choice("ab"), rng.choice(["x", "y "])) for _ in range(length)]

    windows = []
    for i in range(60):
        actions, observations = zip(*some(5), strict=True)
        windows.append(make_window(f"w{i}", [(None, rng.choice("xy"))], actions=list(actions),
                                   observations=list(observations)))  # fmt: skip
    episodes = [episode(*some(8)) for _ in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(episodes))
    suite = load_suite(str(write_suite(windows)))
    (table,) = build_tables([suite], [tmp_path / "train.jsonl"])
    found = {(w["id"], k): table.at(w, k) for w in suite.windows for k in range(1, 6)}
    assert found == {(w["id"], k): stands_in(w, k, episodes) for w in suite.windows for k in range(1, 6)}
    assert set(found.values()) == {True, False}
    assert (table.episodes, table.transitions) == (6, 48)


def test_a_table_and_a_baseline_name_the_same_episodes_by_one_hash(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join(episode(("a", "x"), ("b", name)) for name in "yz"))
    suite = load_suite(str(write_suite([make_window("w")])))
    (table,) = build_tables([suite], [train])
    assert Retrieve.load(suite.windows, [train]).identity == {"episodes_sha256": table.episodes_sha256}


def test_other_environments_do_not_make_a_window_seen(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    window = make_window("w", [(None, "Start.")])
    pairs = list(zip(window["actions"], window["observations"], strict=True))
    (tmp_path / "train.jsonl").write_text(episode(*pairs, env="alfworld"))
    assert not build_tables([load_suite(str(write_suite([window])))], [tmp_path / "train.jsonl"])[0].horizons


def test_results_and_report_split_by_what_was_seen(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    seen, unseen = make_window("s", [(None, "Start.")]), make_window("n", [(None, "Begin.")])
    suite, train = write_suite([seen, unseen]), tmp_path / "train.jsonl"
    train.write_text(episode(*zip(seen["actions"], seen["observations"], strict=True)))
    assert lab_main(["build-seen", "--episodes", str(train), "--suites", str(suite), "--out", str(tmp_path)]) == 0
    table, out = str(tmp_path / "seen-suite.json.gz"), tmp_path / "out"
    run = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed"]
    assert main([*run, "--out", str(out), "--seen", table]) == 0
    results = json.loads((out / "results.json").read_text())
    row = results["rows"][0]
    assert (row["n_seen"], row["em_seen"], row["n_novel"], row["em_novel"]) == (1, 0.0, 1, 0.0)
    assert results["seen_in"]["transitions"] == 5
    assert "| EM unseen (95 %; n) |" in (out / "report.md").read_text()
    assert main([*run, "--out", str(tmp_path / "unknown")]) == 0
    unknown = json.loads((tmp_path / "unknown" / "results.json").read_text())
    assert unknown["seen_in"] is None
    assert "n_novel" not in unknown["rows"][0]


def test_a_table_of_other_windows_is_refused(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text(episode(("a", "b")))
    suite, other = write_suite([make_window("a")]), write_suite([make_window("b")], "other.jsonl")
    build = ["build-seen", "--episodes", str(tmp_path / "train.jsonl"), "--suites", str(other), "--out", str(tmp_path)]
    assert lab_main(build) == 0
    (tmp_path / "torn.json.gz").write_bytes((tmp_path / "seen-other.json.gz").read_bytes()[:40])
    capsys.readouterr()
    run = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed", "--out", str(tmp_path / "out")]
    for name, named in (
        ("seen-other.json.gz", "must be of these windows"),
        ("torn.json.gz", "torn.json.gz: must be a table"),
    ):
        assert main([*run, "--seen", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert named in error
        assert not (tmp_path / "out").exists()


@pytest.fixture
def trained(tmp_path: Path, make_window: MakeWindow, write_suite: WriteSuite) -> Callable[..., int]:
    """Runs a checkpoint on a suite of a seen and an unseen window; `train.jsonl` holds what it was trained on.

    Its game 0 is of a split to train on, which the suite's windows, of game 1, are not.
    """
    seen = make_window("s", [(None, "Start.")], task="walk", variation=1)
    unseen = make_window("n", [(None, "Begin.")], task="walk", variation=1)
    write_suite([seen, unseen])
    lines = [episode(*zip(seen["actions"], seen["observations"], strict=True)), episode(("a", "b"))]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    others = [episode(("a", "c")), lines[0], episode(("a", "b"), env="alfworld")]
    (tmp_path / "more.jsonl").write_text("".join([*lines, *others]))
    model = save_checkpoint(tmp_path / "model", random_model())
    hashes = {int(episode_hash(parse_episode(line)), 16) for line in lines}
    games = {int(hashlib.sha256(b"scienceworld/walk/0").hexdigest()[:16], 16)}
    arrays = {"episodes/scienceworld": hashes, "games/scienceworld": games}
    TrainingEpisodes({name: np.array(sorted(some), np.uint64) for name, some in arrays.items()}).save(model)

    def run(out: str, *options: str) -> int:
        arguments = ["run", "--model", str(model), "--suite", str(tmp_path / "suite.jsonl"), "--context", "observed"]
        return main([*arguments, "--horizons", "1", "--out", str(tmp_path / out), *options])

    return run


def build(folder: Path, *options: str) -> int:
    arguments = ["build-seen", "--suites", str(folder / "suite.jsonl"), "--out", str(folder / "tables")]
    return lab_main([*arguments, *options])


def splits(folder: Path) -> tuple[Any, Any, bool]:
    results = json.loads((folder / "results.json").read_text())
    return results["rows"][0].get("n_seen"), results["rows"][0].get("n_novel"), results["seen_in"] is not None


def test_checkpoint_with_a_table_of_its_episodes_is_split(
    trained: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else lies in the folders; also by the committed table, and where what is given is named."""
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 2)
    monkeypatch.setattr("eval.scores.seen.DATA", tmp_path / "tables")
    assert build(tmp_path, "--episodes", str(tmp_path / "more.jsonl"), "--model", str(tmp_path / "model")) == 0
    table = load_table(tmp_path / "tables" / "seen-suite.json.gz")
    assert (table.episodes, table.transitions) == (2, 6)
    assert trained("committed") == trained("given", "--seen", str(tmp_path / "tables" / "seen-suite.json.gz")) == 0
    assert splits(tmp_path / "committed") == splits(tmp_path / "given") == (1, 1, True)


def test_checkpoint_trained_on_other_episodes_is_unknown(
    trained: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of more episodes, or of all, is not about it; nor is any about a checkpoint without a record."""
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 2)
    monkeypatch.setattr("eval.scores.seen.DATA", tmp_path / "tables")
    assert build(tmp_path, "--episodes", str(tmp_path / "more.jsonl")) == 0
    given = ["--seen", str(tmp_path / "tables" / "seen-suite.json.gz")]
    assert trained("other") == 0
    assert "Unseen and seen: unknown." in capsys.readouterr().out
    assert "Unseen and seen: unknown." in (tmp_path / "other" / "report.md").read_text()
    assert splits(tmp_path / "other") == (None, None, False)
    assert trained("refused", *given) == 2
    assert "must be of the train episodes of --model" in capsys.readouterr().err
    (tmp_path / "model" / FILE).unlink()
    assert trained("unrecorded") == trained("asserted", *given) == 0
    assert splits(tmp_path / "unrecorded") == (None, None, False)
    assert splits(tmp_path / "asserted") == (1, 1, True)


def test_table_without_some_of_the_episodes_is_refused(
    trained: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part.jsonl").write_text((tmp_path / "train.jsonl").read_text().splitlines(keepends=True)[0])
    arguments = ("--episodes", str(tmp_path / "part.jsonl"), "--model", str(tmp_path / "model"))
    assert build(tmp_path, *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line == "error: --episodes: lack 1 of the 2 scienceworld episodes of --model"
    (tmp_path / "model" / FILE).unlink()
    assert build(tmp_path, *arguments) == 2
    assert "must have training_episodes.npz" in capsys.readouterr().err


def test_suite_of_a_game_trained_on_is_refused(
    trained: Callable[..., int], tmp_path: Path, make_window: MakeWindow, write_suite: WriteSuite,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_suite([make_window("a", task="walk", variation=1), make_window("b", task="walk", variation=0)])
    capsys.readouterr()
    assert trained("out") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "--suite: suite: window b: the checkpoint was trained on its game scienceworld/walk/0" in line
    assert not (tmp_path / "out").exists()
