"""Looks by trust against looks every few steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.studies import anchoring
from lab.studies.anchoring import SCHEDULES, Schedule, imagine, looks_at, render, summarize
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined
from tests.fixtures.models import random_model, save_checkpoint

TEXTS = ("start", "a", "b", "c", "d")


class Guessing:
    """Worlds that are right at even steps since the last real one, with trust 0.9, and wrong at odd ones with 0.2."""

    steps_cut = (0,)

    def begin(self, contexts: Sequence[Context]) -> None:
        self.seen, self.steps = len(contexts[0].history), 0

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        self.steps += 1
        right = self.steps % 2 == 0
        text = TEXTS[self.seen + self.steps] if right else "wrong"
        return [Imagined(text, 0.0, 1.0, trust=0.9 if right else 0.2)]

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        assert observations == [TEXTS[self.seen + 1]]
        self.seen, self.steps = self.seen + 1, 0

    def close(self) -> None: ...


def episode(variation: int = 0) -> Episode:
    steps = [Step(None if i == 0 else f"go {i}", text, 0, False) for i, text in enumerate(TEXTS)]
    return Episode("scienceworld", "boil", variation, "dev", "noisy-expert", "goal", tuple(steps))


@pytest.mark.parametrize(
    ("schedule", "looks", "misled"),
    [(Schedule(2), 2, 2), (Schedule(3), 1, 2), (Schedule(least_trust=0.5), 4, 0), (Schedule(least_trust=0.1), 0, 2)],
)
def test_looks_and_misled_steps_are_those_by_hand(schedule: Schedule, looks: int, misled: int) -> None:
    played = episode()
    assert imagine(Guessing(), played, played.steps[1:], schedule) == (looks, misled)  # type: ignore[arg-type]


def test_looks_at_an_error_lie_on_the_line_between_schedules() -> None:
    assert looks_at(0.25, [0.1, 0.5], [0.4, 0.2]) == pytest.approx(0.4)
    assert looks_at(0.9, [0.1, 0.5], [0.4, 0.2]) == 0.1


def test_the_ratio_is_of_looks_at_equal_error() -> None:
    counts = {schedule.name: [(5, 5), (5, 5)] for schedule in SCHEDULES}
    counts["every 5"] = [(8, 4), (8, 4)]
    for schedule, pair in zip([s for s in SCHEDULES if s.least_trust], [(0, 40), (2, 6), (6, 2)], strict=False):
        counts[schedule.name] = [pair, pair]
    for schedule in [s for s in SCHEDULES if s.least_trust][3:]:
        counts[schedule.name] = [(40, 0), (40, 0)]
    results = summarize(counts, [40, 40], 5)
    assert results["ratio"]["mean"] == pytest.approx(4 / 8)
    assert results["ratio"]["ci95"] == pytest.approx([0.5, 0.5])
    assert results["rows"]["every 5"] == {"looks": 0.2, "misled": 0.1}
    assert "trust needs 0.50 (0.50 to 0.50) of the looks" in render(results)


def test_the_command_compares_schedules_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    write_episodes(tmp_path / "two.jsonl", [episode(), episode(1)])
    given = ["anchoring", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out.json"), "--episodes"]
    assert main([*given, str(tmp_path / "two.jsonl"), "--steps", "2"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["steps"] == 4
    assert "| every 2 |" in capsys.readouterr().out
    write_episodes(tmp_path / "one.jsonl", [episode()])
    assert main([*given, str(tmp_path / "one.jsonl")]) == 2
    assert "at least two episodes" in capsys.readouterr().err


def test_limit_takes_episodes_at_equal_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    chosen = list[int | str]()
    monkeypatch.setattr(anchoring, "imagine", lambda worlds, one, *_: chosen.append(one.variation) or (1, 1))
    write_episodes(tmp_path / "five.jsonl", [episode(i) for i in range(5)])
    given = ["anchoring", "--model", str(tmp_path / "model"), "--episodes", str(tmp_path / "five.jsonl")]
    assert main([*given, "--limit", "3", "--out", str(tmp_path / "out.json")]) == 0
    assert chosen[:3] == [0, 1, 3]
