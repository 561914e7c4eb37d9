"""The same steps are judged under the goal that they reach and under goals that they do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from data_prep.solutions import PACKED
from lab.__main__ import main
from lab.agents.searcher import Goal, parse_goal
from lab.data.relabel_goals import reached_at
from lab.data.unpack import unpack
from lab.studies import goal_pairs
from lab.studies.goal_pairs import changed_part, judge, pairs_of, summary
from loopwm.records.episodes import Episode, Step, recorded_episodes, write_episodes
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, Worlds


class Paying:
    """Worlds that pay where the goal names one of these things. asked: the contexts and actions."""

    def __init__(self, things: Sequence[str]) -> None:
        self.things, self.asked = things, list[tuple[Context, str]]()

    def begin(self, contexts: Sequence[Context]) -> None:
        (self.context,) = contexts

    def step(self, actions: Sequence[str], decode: bool) -> list[Imagined]:
        assert not decode
        self.asked += [(self.context, action) for action in actions]
        pays = parse_goal(self.context.goal).thing in self.things
        return [Imagined("", reward=100.0 if pays else 0.0, continuation=0.1 if pays else 0.9) for _ in actions]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    folder = tmp_path_factory.mktemp("episodes")
    unpack(PACKED / "alfworld-dev-expert.tar.xz", folder)
    return recorded_episodes([folder])[::12]


def test_pairs_differ_in_one_part_and_in_what_is_reached(episodes: list[Episode]) -> None:
    pairs = list(pairs_of(episodes, 0))
    assert {pair.part for pair in pairs} == {"thing", "place", "state", "count"}
    for pair in pairs:
        own, other = parse_goal(pair.won.goal), parse_goal(pair.missed.goal)
        assert changed_part(own, other) == pair.part
        assert reached_at(pair.won, own) == len(pair.won.steps) - 1
        assert reached_at(pair.missed, other) is None
        assert [step.action for step in pair.won.steps] == [step.action for step in pair.missed.steps]


def test_episodes_that_were_not_won_are_left_out(episodes: list[Episode]) -> None:
    assert list(pairs_of([replace(one, steps=one.steps[:-1]) for one in episodes], 0)) == []


def test_boxes_of_scienceworld_are_exchanged() -> None:
    goal = "If it melts, focus on the red box. If not, focus on the blue box."
    steps = (
        Step(None, "A room.", 0, False),
        Step("wait", "Ok.", 75, False),
        Step("focus on red box", "Ok.", 100, True),
    )
    episode = Episode("scienceworld", "melt", 3, "dev", "gold", goal, steps)
    (pair,) = pairs_of([episode, replace(episode, steps=steps[:2])], 0)
    assert (pair.part, pair.won) == ("box", episode)
    assert pair.missed.goal == "If it melts, focus on the blue box. If not, focus on the red box."


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (Goal("egg", "desk"), "thing"),
        (Goal("mug", "shelf"), "place"),
        (Goal("mug", "desk", verb="heat"), "state"),
        (Goal("mug", "desk", count=2), "count"),
        (Goal("egg", "shelf"), None),
    ],
)
def test_a_goal_that_differs_in_several_parts_is_no_pair(other: Goal, part: str | None) -> None:
    assert changed_part(Goal("mug", "desk"), other) == part


def test_the_last_step_is_imagined_after_all_others(episodes: list[Episode]) -> None:
    (pair, *_), worlds = list(pairs_of(episodes, 0)), Paying(())
    judge(cast(Worlds, worlds), [pair])
    for (context, action), episode in zip(worlds.asked, (pair.won, pair.missed), strict=True):
        assert (context.goal, context.observation) == (episode.goal, episode.steps[0].observation)
        assert [step.action for step in context.history] == [step.action for step in episode.steps[1:-1]]
        assert action == episode.steps[-1].action


def test_a_model_that_reads_the_thing_only_pays_for_other_places(episodes: list[Episode]) -> None:
    pairs = list(pairs_of(episodes, 0))
    game = next(pair.won for pair in pairs if pair.part == "place")
    worlds = Paying([parse_goal(game.goal).thing])
    shares = summary(judge(cast(Worlds, worlds), [pair for pair in pairs if pair.won is game]))
    assert {"thing", "place"} <= shares.keys()
    assert {part: row["both_right"] for part, row in shares.items() if part != "all"} == {
        part: 100.0 * (part == "thing") for part in shares if part != "all"
    }
    assert {row["won_pays"] for row in shares.values()} == {row["won_ends"] for row in shares.values()} == {100.0}


def test_the_command_writes_the_shares(
    episodes: list[Episode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goal_pairs, "load", lambda model: Paying(()))
    write_episodes(tmp_path / "in.jsonl", episodes)
    given = ["--model", "any", "--episodes", str(tmp_path / "in.jsonl"), "--out", str(tmp_path)]
    assert main(["goal-pairs", *given]) == 0
    shares = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["pairs"]
    assert shares["all"]["n"] == sum(shares[part]["n"] for part in shares if part != "all")
    assert "| all |" in capsys.readouterr().out


def test_episodes_without_a_win_are_refused(tmp_path: Path, episodes: list[Episode]) -> None:
    write_episodes(tmp_path / "in.jsonl", [replace(episodes[0], steps=episodes[0].steps[:2])])
    given = ["--model", "any", "--episodes", str(tmp_path / "in.jsonl"), "--out", str(tmp_path)]
    assert main(["goal-pairs", *given]) == 2
