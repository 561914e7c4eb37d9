"""`list` and `validate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.__main__ import main
from eval.models.options import BASELINES
from eval.scores.suites import suite_names
from tests.fixtures.windows import MakeWindow, WriteSuite


def test_list_names_every_suite_with_its_contexts_and_every_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "| alfworld-500 | alfworld | 500 | 5 | 1-5 | observed, snapshot, full, briefed |" in printed
    assert all(f"| {name} |" in printed for name in (*suite_names(), *BASELINES))


def test_a_context_is_listed_with_the_windows_that_allow_it_unless_all_do_or_none(
    make_window: MakeWindow,
    write_suite: WriteSuite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_suite([make_window("a"), make_window("b", look=None)])
    monkeypatch.setattr("eval.commands.listing.suite_names", lambda: [str(path)])
    assert main(["list"]) == 0
    assert "| scienceworld | 2 | 1 | 1-5 | observed, snapshot (1) |" in capsys.readouterr().out


def test_a_sound_file_is_fine(suite_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(suite_path)]) == 0
    assert capsys.readouterr().out == f"{suite_path}: 40 windows, fine\n"


def test_every_fault_is_named_by_its_line(
    make_window: MakeWindow, write_suite: WriteSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = make_window("bad", goal=3, actions=["a", " "])
    bad["history"] = [{"action": "x", "observation": "y"}, "z"]  # type: ignore[list-item, typeddict-item]
    surrogate = make_window("surrogate", look="\ud800")
    path = write_suite([make_window("good"), bad, make_window("good"), surrogate])
    path.write_text(path.read_text() + "\n{broken\n[1]\n")
    assert main(["validate", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"{path}: line {fault}"
        for fault in (
            "2: goal: unexpected int",
            "2: history[0].action: must be null, it is the first observation",
            "2: history[1]: expected an object",
            "2: actions[1]: must not be empty",
            "2: observations: has 5 entries, actions has 2",
            "2: rewards: has 5 entries, actions has 2",
            "2: dones: has 5 entries, actions has 2",
            "3: id: 'good' is also that of line 1",
            "4: must be valid Unicode, got a lone surrogate",
            "6: not JSON (Expecting property name enclosed in double quotes at column 2)",
            "7: expected a JSON object",
        )
    ]
    assert captured.err == f"error: {path}: 5 of 6 lines are invalid\n"


def test_a_file_without_windows_or_unreadable_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    for name in ("empty.jsonl", "torn.jsonl.gz", "missing.jsonl"):
        assert main(["validate", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: ")
