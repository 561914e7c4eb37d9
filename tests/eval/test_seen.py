"""Which windows are seen: against a slow search, and in results."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from eval.__main__ import main
from eval.commands.seen import build_tables
from eval.models.retrieve import load_retrieve
from eval.scores.entities import DATA
from eval.scores.seen import find_seen, load_table
from eval.scores.suites import load_suite, suite_names
from loopwm.records.windows import Window
from tests.eval.conftest import MakeWindow, WriteSuite, episode


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


def test_a_table_and_a_floor_name_the_same_episodes_by_one_hash(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join(episode(("a", "x"), ("b", name)) for name in "yz"))
    suite = load_suite(str(write_suite([make_window("w")])))
    (table,) = build_tables([suite], [train])
    assert load_retrieve(suite.windows, [train]).identity == {"episodes_sha256": table.episodes_sha256}


def test_other_environments_do_not_make_a_window_seen(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    window = make_window("w", [(None, "Start.")])
    pairs = list(zip(window["actions"], window["observations"], strict=True))
    (tmp_path / "train.jsonl").write_text(episode(*pairs, env="alfworld"))
    assert not build_tables([load_suite(str(write_suite([window])))], [tmp_path / "train.jsonl"])[0].seen


def test_results_and_report_split_by_what_was_seen(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    seen, novel = make_window("s", [(None, "Start.")]), make_window("n", [(None, "Begin.")])
    suite, train = write_suite([seen, novel]), tmp_path / "train.jsonl"
    train.write_text(episode(*zip(seen["actions"], seen["observations"], strict=True)))
    assert main(["build-seen", "--episodes", str(train), "--suites", str(suite), "--out", str(tmp_path)]) == 0
    table, out = str(tmp_path / "seen-suite.json.gz"), tmp_path / "out"
    run = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed"]
    assert main([*run, "--out", str(out), "--seen", table]) == 0
    results = json.loads((out / "results.json").read_text())
    row = results["rows"][0]
    assert (row["n_seen"], row["em_seen"], row["n_novel"], row["em_novel"]) == (1, 0.0, 1, 0.0)
    assert results["seen_in"]["transitions"] == 5
    assert "| EM novel (95 %; n) |" in (out / "report.md").read_text()
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
    assert main(build) == 0
    (tmp_path / "torn.json.gz").write_bytes((tmp_path / "seen-other.json.gz").read_bytes()[:40])
    capsys.readouterr()
    run = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed", "--out", str(tmp_path / "out")]
    for name, named in (("seen-other.json.gz", "not of these windows"), ("torn.json.gz", "torn.json.gz: not a table")):
        assert main([*run, "--seen", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert named in error
        assert not (tmp_path / "out").exists()


def test_committed_tables_are_of_the_committed_suites() -> None:
    found = {name: find_seen(load_suite(name), None) for name in suite_names()}
    tables = [load_table(path) for path in DATA.glob("seen-*")]
    assert {table.suite for table in tables} == {name for name, seen in found.items() if seen is not None}
    assert tables
