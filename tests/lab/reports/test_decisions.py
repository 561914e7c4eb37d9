"""Which of two plans a model prefers, against what they bring in the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main as evaluate
from lab.__main__ import main
from lab.reports.decisions import Decision, Outcome, accuracy, decisions_of
from loopwm.records.windows import check_window

DONE, REFUSED = "You take it.", "Nothing happens."


def window(name: str, rewards: list[float], observations: list[str]) -> dict[str, Any]:
    return {
        "id": name, "env": "alfworld", "task": "pick", "variation": name.split("/")[0], "family": "pick",
        "split": "valid_seen", "goal": "g", "history": [{"action": None, "observation": "A room."}],
        "actions": ["a", "b"], "observations": observations, "rewards": rewards, "dones": [False, False],
    }  # fmt: skip


PAIRS = [
    window("one/fact", [0, 100], [DONE, DONE]),
    window("one/counterfact", [0, 0], [DONE, REFUSED]),
    window("two/fact", [0, 0], [REFUSED, REFUSED]),
    window("two/counterfact", [0, 0], [DONE, REFUSED]),
]


def write_run(folder: Path, predictions: dict[str, list[tuple[str, float]]]) -> tuple[Path, Path]:
    """Run `eval run` with `copy` on the pairs, then replace its predictions by these texts and rewards."""
    suite, run = folder / "pairs.jsonl", folder / "run"
    suite.write_text("".join(json.dumps(line) + "\n" for line in PAIRS))
    command = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed", "--horizons", "1,2"]
    assert evaluate([*command, "--out", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    for line in lines:
        line["prediction"], line["reward"] = predictions[line["id"]][line["horizon"] - 1]
    (run / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return suite, run


def decided(*imagined: tuple[Outcome, Outcome]) -> list[Decision]:
    """Return decisions whose first plan brings a point and no refusal in the simulator, the second nothing."""
    return [Decision(f"game {i}", (Outcome(1, 0), Outcome(0, 1)), pair) for i, pair in enumerate(imagined)]


def test_right_wrong_and_undecided_count_one_zero_and_a_half() -> None:
    right, wrong = (Outcome(1, 0), Outcome(0, 0)), (Outcome(0, 0), Outcome(1, 0))
    alike = (Outcome(2, 3), Outcome(2, 3))
    found = accuracy(decided(right, right, wrong, alike), "points")
    assert found is not None
    assert (found.n, found.right, found.undecided) == (4, 0.625, 0.25)
    assert found.low < 0.625 < found.high


def test_points_come_before_refusals_and_refusals_decide_among_equals() -> None:
    points_first = accuracy(decided((Outcome(1, 2), Outcome(0, 0))), "points, then refusals")
    equal_points = accuracy(decided((Outcome(1, 2), Outcome(1, 3))), "points, then refusals")
    fewer_refused = accuracy(decided((Outcome(1, 2), Outcome(0, 0))), "refusals")
    assert [found and found.right for found in (points_first, equal_points, fewer_refused)] == [1, 1, 0]


def test_pairs_that_the_simulator_values_alike_are_left_out() -> None:
    same = [Decision("game", (Outcome(0, 1), Outcome(0, 1)), (Outcome(1, 0), Outcome(0, 1)))]
    assert accuracy(same, "points, then refusals") is None


def test_a_window_without_its_pair_is_no_decision() -> None:
    windows = [check_window(dict(line), "here") for line in PAIRS[:3]]
    records: Any = {(w["id"], k): {"prediction": DONE, "reward": 0.5} for w in windows for k in (1, 2)}
    (decision,) = decisions_of(windows, records)
    assert decision.simulated == (Outcome(100, 0), Outcome(0, 1))
    assert decision.imagined == (Outcome(1, 0), Outcome(1, 0))
    assert decision.game.endswith("one")


def test_command_prints_a_line_for_each_criterion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, run = write_run(
        tmp_path,
        {
            "one/fact": [(DONE, 0), (DONE, 90)],
            "one/counterfact": [(DONE, 80), (REFUSED, 99)],
            "two/fact": [(DONE, 0), (DONE, 0)],
            "two/counterfact": [(DONE, 0), (REFUSED, 0)],
        },
    )
    capsys.readouterr()
    assert main(["decisions", str(run), "--suite", str(suite)]) == 0
    rows = [[cell.strip(" |") for cell in line.split(" | ")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[row[1], row[2], row[3], row[5]] for row in rows] == [
        ["points", "1", "100.0", "0.0"],
        ["refusals", "2", "50.0", "0.0"],
        ["points, then refusals", "2", "50.0", "0.0"],
    ]


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, run = write_run(tmp_path, {line["id"]: [(DONE, 0), (DONE, 0)] for line in PAIRS})
    lines = (run / "predictions.jsonl").read_text().splitlines(keepends=True)
    (run / "predictions.jsonl").write_text("".join(line for line in lines if json.loads(line)["horizon"] == 2))
    assert main(["decisions", str(run), "--suite", str(suite)]) == 2
    assert "run: horizons: must have every action of one/fact, lacks 1" in capsys.readouterr().err
    assert main(["decisions", str(run), "--suite", "scienceworld-counterfactual"]) == 2
    assert "name its file with --suite" in capsys.readouterr().err
    suite.write_text(json.dumps(PAIRS[0]) + "\n")
    command = ["run", "--model", "copy", "--suite", str(suite), "--context", "observed", "--horizons", "1,2"]
    assert evaluate([*command, "--out", str(tmp_path / "alone")]) == 0
    assert main(["decisions", str(tmp_path / "alone"), "--suite", str(suite)]) == 2
    assert "suite: must have pairs" in capsys.readouterr().err
