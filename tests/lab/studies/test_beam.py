"""Plans that a beam search finds before the win are played in the real game."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from data_prep.environments import ENVIRONMENTS
from lab.__main__ import main
from lab.agents.play import PLAYS
from lab.agents.real_world import Game, RealWorld
from lab.studies.beam import by_rules, measure, place_before_win, searched
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined
from tests.fixtures.kitchen import Kitchen
from tests.fixtures.models import random_model, save_checkpoint

WAY = ("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1", "go to cabinet 2", "move mug 1 to cabinet 2")


class Rehearsed:
    """Worlds that are the kitchen itself. trust: in every step."""

    def __init__(self, trust: float = 1.0, paths: Sequence[tuple[str, ...]] = ()) -> None:
        self.trust, self.paths = trust, list(paths)

    def begin(self, contexts: Sequence[Context]) -> None:
        self.paths = [tuple(step.action for step in context.history) for context in contexts]

    def fork(self, rows: Sequence[int]) -> Rehearsed:
        return Rehearsed(self.trust, [self.paths[row] for row in rows])

    def step(self, actions: Sequence[str]) -> list[Imagined]:
        self.paths = [(*path, action) for path, action in zip(self.paths, actions, strict=True)]
        return [self._last(path) for path in self.paths]

    def close(self) -> None: ...

    def _last(self, path: Sequence[str]) -> Imagined:
        kitchen = Kitchen()
        kitchen.reset("put", "plain")
        *_, last = map(kitchen.step, path)
        return Imagined(last.observation, float(last.score), 0.0 if last.done else 1.0, trust=self.trust)


@pytest.fixture
def kitchen(monkeypatch: pytest.MonkeyPatch) -> Game:
    monkeypatch.setitem(ENVIRONMENTS, "alfworld", Kitchen)
    return Game("put", "plain")


def expert() -> Episode:
    world = Kitchen()
    first = world.reset("put", "plain")
    return Episode("alfworld", "put", "plain", "dev", "expert", world.goal(), (first, *map(world.step, WAY)))


def test_the_place_is_so_many_actions_before_the_win() -> None:
    place = place_before_win(expert(), 2)
    assert place is not None
    assert [step.action for step in place.history] == list(WAY[:3])
    assert place_before_win(expert(), 6) is None


def test_plans_are_played_and_the_command_resumes(kitchen: Game, tmp_path: Path) -> None:
    worlds = Rehearsed()
    planners = {
        "rules": by_rules,
        "greedy": lambda *_: [],
        "beam": partial(searched, worlds, 8),  # type: ignore[arg-type]  # as LocalWorlds, as far as a search needs
    }
    with RealWorld("alfworld") as world:
        results = measure(world, planners, [expert()], [1, 2, 3], tmp_path / "out", {})
        for row in results["rows"].values():
            assert [row["arms"][arm]["won"]["mean"] for arm in ("rules", "greedy", "beam")] == [100, 0, 100]
            assert (row["n"], row["planned"]["n"], row["planned"]["mean"]) == (1, 1, 100)
        worlds.trust = 0  # would plan nothing
        assert measure(world, planners, [expert()], [1, 2, 3], tmp_path / "out", {})["rows"] == results["rows"]
        left = measure(world, planners, [expert()], [2], tmp_path / "new", {})["rows"]["2"]
    assert (left["arms"]["beam"]["won"]["mean"], left["planned"]) == (0, {"n": 0})
    assert "| 2 | 1 | 100.0 (100.0 to 100.0) |" in (tmp_path / "out/report.md").read_text()


def test_a_torn_line_and_other_episodes_plays_do_not_count(kitchen: Game, tmp_path: Path) -> None:
    planners = dict.fromkeys(("rules", "greedy", "beam"), by_rules)
    with RealWorld("alfworld") as world:
        measure(world, planners, [expert()], [1, 2], tmp_path, {})
        torn = (tmp_path / PLAYS).read_text().replace("plain", "other")[:-9]
        (tmp_path / PLAYS).write_text(torn)
        results = measure(world, planners, [expert()], [1, 2], tmp_path, {})
    assert [row["n"] for row in results["rows"].values()] == [1, 1]


def test_a_run_of_other_episodes_is_not_resumed(kitchen: Game, tmp_path: Path, capsys) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    given = ["beam", "--model", str(tmp_path / "model"), "--before", "1", "--out", str(tmp_path / "out")]
    for split, status in (("dev", 0), ("test", 2)):
        write_episodes(tmp_path / split / "episodes.jsonl", [replace(expert(), split=split)])
        assert main([*given, "--episodes", str(tmp_path / split / "episodes.jsonl")]) == status
    assert "episodes_sha256 must be" in capsys.readouterr().err


def test_the_command_runs_a_checkpoint_and_names_what_it_needs(
    kitchen: Game, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    write_episodes(tmp_path / "shown.jsonl", [expert()])
    given = ["beam", "--model", str(tmp_path / "model"), "--before", "1", "--episodes"]
    assert main([*given, str(tmp_path / "shown.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert "| 1 | 1 |" in capsys.readouterr().out
    (tmp_path / "none.jsonl").write_text("")
    assert main([*given, str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "none")]) == 2
    assert "--episodes" in capsys.readouterr().err
