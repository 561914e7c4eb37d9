"""Episodes with an agent's mistakes: whose steps it recalls, and when it strays from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from data_prep.environments.scienceworld.environment import ScienceWorld
from lab.__main__ import main
from lab.data import collect_agents
from lab.data.collect_agents import STRAYS, Agents, _strays
from loopwm.records.episodes import Episode, Step, recorded_episodes, write_episodes
from loopwm.records.template import Context, Transition
from tests.fixtures.episodes import play_once
from tests.fixtures.toy import Toy

VARIATIONS = range(8)


def walk_of(variation: int) -> Episode:
    """A solution whose actions name its variation."""
    actions = [f"take {variation}", f"focus on {variation}", f"carry {variation}"]
    steps = [Step(None, "start", 0, False)]
    steps += [
        Step(action, f"done {action}", 100 if action == actions[-1] else 0, action == actions[-1]) for action in actions
    ]
    return Episode("toy", "walk", variation, "train", "gold", "stop", tuple(steps), None)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "walks.jsonl.xz"
    write_episodes(path, [walk_of(variation) for variation in VARIATIONS])
    return path


def played(paths: Sequence[Path], variation: int, seed: int, steps: int = 12) -> list[str]:
    """Actions of a play in which every answer is new."""
    environment = Toy()
    environment.reset("walk", variation)
    actions = Agents(paths).act(environment, [], Random(seed))
    taken = [next(actions)]
    with suppress(StopIteration):
        while len(taken) < steps:
            taken.append(actions.send(Step(taken[-1], f"answer {len(taken)}", 0, False)))
    return taken


@pytest.mark.parametrize("variation", VARIATIONS)
def test_agent_recalls_no_step_of_its_own_variation(recorded: Path, variation: int) -> None:
    named = {action.split()[-1] for seed in range(20) for action in played([recorded], variation, seed)[1:]}
    assert len(named & {str(other) for other in VARIATIONS}) > 1
    assert str(variation) not in named


def test_agent_that_never_strays_takes_the_first_candidate(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_agents, "MOST_STRAYS", 0)
    assert len({tuple(played([recorded], 0, seed)) for seed in range(5)}) == 1


def test_strays_but_candidates_are_of_a_verb_that_may_end_the_episode() -> None:
    history = (Transition("focus on 1", "done"), Transition("take 1", "done"))
    candidates = ["take 2", "focus on 2"]
    strays = {kind: list(_strays(kind, candidates, Toy(), Context("", "", history))) for kind in STRAYS}
    assert strays == {
        "candidate": candidates, "misused candidate": ["focus on 2"], "again": ["focus on 1"],
        "misuse": ["focus on north"],
    }  # fmt: skip


def test_collect_agents_records_plays_of_the_real_world(simulator: ScienceWorld, tmp_path: Path) -> None:
    task, out = "find-non-living-thing", tmp_path / "agent"
    gold = [play_once(simulator, "gold", task, variation, "train", 40) for variation in (0, 1, 2, 3)]
    write_episodes(tmp_path / "gold.jsonl.xz", gold)
    options = ["--split", "train", "--tasks", task, "--episodes-per-task", "2", "--max-steps", "6", "--out", str(out)]
    assert main(["collect-agents", "scienceworld", *options, "--agent-episodes", str(tmp_path / "gold.jsonl.xz")]) == 0
    recalled = {step.action for episode in gold for step in episode.steps}
    episodes = list(recorded_episodes([out]))
    assert [(episode.policy, len(episode.steps) > 2) for episode in episodes] == [("agent", True)] * 2
    taken = {step.action for episode in episodes for step in episode.steps}
    assert all((action or "").startswith("focus on") for action in taken - recalled - {*ScienceWorld.looks})
