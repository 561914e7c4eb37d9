"""Human-normalised scores and their aggregates, by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from lab.__main__ import main
from lab.pixels.atari import aggregate, interquartile_mean, normalised


def test_random_play_scores_0_and_people_1() -> None:
    assert normalised("Pong", -20.7) == 0
    assert normalised("Pong", 14.6) == 1
    assert normalised("Breakout", 16.1) == pytest.approx(0.5)


def test_aggregates_of_two_runs_of_three_games_by_hand() -> None:
    found = aggregate(np.array([[0.0, 1.0, 4.0], [0.2, 2.0, 0.4]]))
    assert found["mean"] == pytest.approx((0.1 + 1.5 + 2.2) / 3)
    assert found["median"] == pytest.approx(1.5)
    assert found["iqm"] == pytest.approx((0.2 + 0.4 + 1.0 + 2.0) / 4)
    assert found["optimality_gap"] == pytest.approx((1.0 + 0.8 + 0.6) / 6)
    assert interquartile_mean(np.arange(8.0)) == pytest.approx(3.5)


def played(folder: Path, name: str, environment: str, score: float) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment, "agent": {"mean_return": score}}))
    return str(path)


def test_the_command_tells_games_and_overall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [played(tmp_path, "a", "atari/Pong", -20.7), played(tmp_path, "b", "atari/Freeway", 29.6)]
    assert main(["pixels", "atari", *files, "--out", str(tmp_path / "scores.json")]) == 0
    overall = json.loads((tmp_path / "scores.json").read_text())["overall"]
    assert overall == {"mean": 0.5, "median": 0.5, "iqm": 0.5, "optimality_gap": 0.5}
    assert "game Freeway" in capsys.readouterr().out


def test_what_cannot_be_scored_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pong, again = (played(tmp_path, name, "atari/Pong", 1.0) for name in ("a", "b"))
    cases = {
        "environment: must begin with atari/": [played(tmp_path, "c", "catch", 1.0)],
        "game: must be one of the 26 games of Atari 100k, got Tetris": [played(tmp_path, "d", "atari/Tetris", 1.0)],
        "must be the same number for each game": [pong, again, played(tmp_path, "e", "atari/Freeway", 1.0)],
        "a.json: must be given once, got it 2 times": [pong, str(tmp_path / ".." / tmp_path.name / "a.json")],
        "no-such.json": [str(tmp_path / "no-such.json")],
    }
    if importlib.util.find_spec("rliable") is None:
        cases["loopwm[rliable]"] = [pong, "--intervals"]
    for message, arguments in cases.items():
        assert main(["pixels", "atari", *arguments, "--out", str(tmp_path / "out.json")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
        assert not (tmp_path / "out.json").exists()
