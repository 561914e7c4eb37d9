"""A loss is foreseen where the model imagines fewer points, at the steps that changed the score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.studies import losses
from lab.studies.losses import turns
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import Context, Transition
from loopwm.worlds.protocol import Imagined

START = Step(None, "a room", 0, False)
LOST = Episode(
    "scienceworld", "melt", 1, "dev", "fatal", "Melt lead.",
    (START, Step("go to hall", "a hall", 3, False), Step("focus on cup", "You focus on the cup.", -100, True)),
)  # fmt: skip
WON = Episode(
    "scienceworld", "boil", 2, "dev", "gold", "Boil water.",
    (
        START,
        Step("focus on air", "No known action matches that input.", 0, False),
        Step("focus on water", "You focus on it.", 9, False),
    ),
)  # fmt: skip


def test_turns_are_the_uses_with_what_came_of_them_and_what_was_seen_before() -> None:
    lost, absent, won = turns([LOST, WON])
    assert (lost.task, lost.action, lost.outcome) == ("melt", "focus on cup", "lost")
    assert lost.context == Context("Melt lead.", "a room", (Transition("go to hall", "a hall"),))
    assert (absent.action, absent.outcome, absent.context.history) == ("focus on air", "absent", ())
    assert (won.action, won.outcome) == ("focus on water", "paid")
    assert len(won.context.history) == 1


class Pessimist:
    """Worlds in which everything that is focused on but air loses."""

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        return [Imagined("", reward=-100.0 if action.startswith("focus") else 0.0) for action in actions]


def test_losses_of_a_folder_are_counted_by_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(losses, "load", lambda model: Pessimist())
    write_episodes(tmp_path / "a.jsonl", [LOST, WON])
    assert main(["losses", "--episodes", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["lost"] == {"n": 1, "predicted": 2, "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3)}
    assert result["taken_for"] == {"paid": {"lost": 1}, "lost": {"lost": 1}, "absent": {"lost": 1}}
    assert result["tasks"]["melt"]["recall"] == 1
    assert result["tasks"]["boil"]["precision"] == 0
    write_episodes(tmp_path / "a.jsonl", [Episode("scienceworld", "melt", 1, "dev", "gold", "Melt lead.", (START,))])
    assert main(["losses", "--episodes", str(tmp_path)]) == 2
    assert "must hold a 'focus' that changed the score" in capsys.readouterr().err
