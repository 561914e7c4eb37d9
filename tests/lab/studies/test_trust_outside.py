"""One thing of a window is exchanged at a time, and trust is averaged as the worlds return it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from eval.scores.suites import load_suite
from lab.__main__ import main
from lab.studies import trust_outside
from lab.studies.trust_outside import Case, cases, evenly, measure, read_memories
from loopwm.records.errors import InputError
from loopwm.records.template import Context, window_context
from loopwm.records.windows import game_of
from loopwm.worlds.protocol import Imagined, Worlds

OWN = evenly(load_suite("scienceworld-dev-noisy").windows, 8)
OTHER = evenly(load_suite("alfworld-dev-noisy").windows, 8)


class Repeating:
    """Worlds that answer with the first observation, sure of it in ALFWorld only."""

    def __init__(self) -> None:
        self.contexts: Sequence[Context] = ()

    def begin(self, contexts: Sequence[Context]) -> None:
        self.contexts = contexts

    def step(self, actions: Sequence[str]) -> list[Imagined]:
        return [
            Imagined(context.observation, trust=0.95 if "Looking quickly" in context.observation else None)
            for context in self.contexts
        ]


@pytest.mark.parametrize("condition", ["other-action", "other-history", "other-game", "foreign"])
def test_cases_exchange_one_part_of_each_window(condition: str) -> None:
    conditions = cases(OWN, OTHER)
    for i, (window, own, case) in enumerate(zip(OWN, conditions["own"], conditions[condition], strict=True)):
        assert own == Case(game_of(window), window_context(window, "observed"), window["actions"][0], own.reference)
        assert own.reference == window["observations"][0]
        assert case.reference is None
        assert (case.action == own.action) is (condition != "other-action")
        assert (case.context == own.context) is (condition == "other-action")
        assert (case.context.goal == own.context.goal) is (condition != "foreign")
        if condition == "other-history":
            assert replace(case.context, goal="") == replace(window_context(OTHER[i], "observed"), goal="")


def test_other_game_takes_a_history_of_another_game_of_the_world() -> None:
    histories = {window["history"][0]["observation"] + str(len(window["history"])): game_of(window) for window in OWN}
    others = cases(OWN, OTHER)["other-game"]
    assert len({case.context.observation for case in others}) > 2  # the next one, not always the first
    for case in others:
        assert histories[case.context.observation + str(len(case.context.history) + 1)] != case.game


def test_a_single_game_has_no_other_game() -> None:
    with pytest.raises(InputError, match="--limit: must leave windows of two games"):
        cases(OWN[:1], OTHER)


def test_measure_counts_a_missing_trust_as_zero() -> None:
    some = [Case("a", Context("g", "Looking quickly"), "x", "Looking quickly"), Case("b", Context("g", "n"), "x", "m")]
    figures = measure(cast(Worlds, Repeating()), some, together=1)
    assert (figures["n"], figures["trust"]["mean"], figures["high"]["mean"]) == (2, 0.475, 0.5)
    assert figures["exact"]["mean"] == 0.5
    assert figures["trust"]["ci95"] == [0.0, 0.95]
    assert "exact" not in measure(cast(Worlds, Repeating()), [some[0]._replace(reference=None), some[1]], together=2)


def test_command_prints_a_table_for_each_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memories: list[Sequence[Path]] = []

    def load(model: Path, memory: Sequence[Path] = ()) -> Repeating:
        memories.append(memory)
        return Repeating()

    monkeypatch.setattr(trust_outside, "load", load)
    assert main(["trust-outside", "--limit", "6", "--memory", "alfworld=logs", "--out", str(tmp_path / "r.json")]) == 0
    assert memories == [(), [Path("logs")]]
    results = json.loads((tmp_path / "r.json").read_text())["worlds"]
    assert list(results["alfworld"]) == ["own", "other-action", "other-history", "other-game", "foreign", "memory"]
    assert list(results["scienceworld"])[-1] == "other-memory"
    assert results["alfworld"]["own"]["trust"]["mean"] == pytest.approx(0.95)
    assert "| other-history | 6 | 95.0 (95.0 to 95.0)" in capsys.readouterr().out


@pytest.mark.parametrize("pair", ["logs", "pong=logs"])
def test_memory_of_no_world_is_refused(pair: str) -> None:
    with pytest.raises(InputError, match="--memory: must be WORLD=FILE with a world of scienceworld, alfworld"):
        read_memories([pair])
