"""Deviations leave the solution's path as each promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from data_prep.policies import LONGEST_CARELESS, Walk
from lab.data import collect_deviations
from lab.main import main
from loopwm.records.episodes import Step, read_episodes
from tests.data_prep.test_policies import GOLD, Marked, acted
from tests.fixtures.toy import Toy

collect_deviations.register()


def test_in_a_fork_another_action_takes_the_next_ones_place_and_the_path_goes_on_before_it_is_found_again() -> None:
    environment = Marked()
    played = acted("fork", GOLD, seed=3, environment=environment)
    assert environment.marks > 20
    for mark in range(1, environment.marks + 1):
        back = played.index(f"back to {mark}")
        replaced = GOLD.index(played[back + 1])
        start = max(i for i in range(back) if played[i] not in GOLD)
        assert played[start - 1] == GOLD[replaced - 1]
        assert played[start + 1 : back] == GOLD[replaced + 1 : replaced + 1 + back - start - 1]
        assert back - start - 1 <= LONGEST_CARELESS
    kept = [action for action in played if action in GOLD]
    assert list(dict.fromkeys(sorted(kept, key=GOLD.index))) == GOLD


def test_the_other_action_of_a_fork_is_never_the_paths() -> None:
    walk = Walk(Toy(), Random(0))
    others = {collect_deviations.other_action(walk, ["north"], collect_deviations.FORK.kinds) for _ in range(200)}
    assert others == {"south", "look around", "inventory"}


def test_a_fork_plays_no_fatal_step_out_of_turn() -> None:
    path = ["focus on red cup" if i % 3 == 0 else f"gold {i}" for i in range(200)]
    environment = Marked()
    played = acted("fork", path, seed=3, environment=environment)
    places = [played.index(f"back to {mark}") for mark in range(1, environment.marks + 1)]
    assert len(places) > 20
    for back in places:
        start = max(i for i in range(back) if played[i] not in path)
        assert "focus on red cup" not in played[start + 1 : back]


def test_an_omission_leaves_out_a_step_that_the_next_ones_need() -> None:
    rounds = [f"{verb} red cup {i}" for i in range(60) for verb in ("find", "take", "fill")]
    path = [step for i in range(60) for step in (*rounds[3 * i : 3 * i + 3], "wait", "go far", "go near")]
    environment = Marked()
    played = acted("omission", path, seed=3, environment=environment)
    assert environment.marks > 20
    for mark in range(1, environment.marks + 1):
        back = played.index(f"back to {mark}")
        start = max(i for i in range(back) if played[i] not in path)
        left_out = path.index(played[start + 1]) - 1
        assert path[left_out].split()[0] in ("find", "take")
        assert played[start + 1 : back] == path[left_out + 1 : left_out + back - start]
        assert back - start - 1 in collect_deviations.OMISSION.lengths


def test_later_steps_are_tried_where_they_do_not_belong_and_then_the_path_is_found_again() -> None:
    steps = ("go to", "take", "fill", "focus on", "drop")
    path = [f"{step} {i}" for i in range(40) for step in steps]
    environment = Marked()
    played = acted("ahead", path, seed=3, environment=environment)
    start = elsewhere = 0
    for mark, (left, then) in enumerate(pairwise([*environment.rests, []]), start=1):
        back = played.index(f"back to {mark}")
        tried = [action for action in played[start:back] if action in path]
        assert len(tried) <= max(*collect_deviations.TRIES, LONGEST_CARELESS)
        focus = next((action for action in left if action.startswith("focus")), None)
        assert all(action == focus or not action.startswith("focus") for action in tried)
        elsewhere += sum(action.split()[-1] != left[0].split()[-1] for action in tried)
        start = back + 1 + len(left) - len(then)
        assert played[back + 1 : start] == left[: len(left) - len(then)]
    assert elsewhere > len(environment.rests) > 40


class Doors(Marked):
    """Two of its valid actions change what is seen."""

    def valid_actions(self) -> list[str]:
        return ["open door", "close door", "read sign", "focus on door"]


def test_changes_stand_between_equal_looks() -> None:
    environment = Doors()
    played = acted("changing", GOLD, seed=3, environment=environment)
    start = 0
    for mark in range(1, environment.marks + 1):
        back = played.index(f"back to {mark}")
        inserted = [action for action in played[start:back] if action not in GOLD]
        changes = [place for place, action in enumerate(inserted) if action in ("open door", "close door")]
        looks = inserted[: changes[0]]
        assert set(looks) <= {"look around", "inventory"}
        assert inserted == looks + [action for place in changes for action in (inserted[place], *looks)]
        assert 1 <= len(changes) <= max(collect_deviations.CHANGES)
        start = back + 1
    assert [action for action in played if action in GOLD] == GOLD
    assert environment.marks > 50


class Pots(Toy):
    """Things that may be focused on, one of them as the path does."""

    def valid_actions(self) -> list[str]:
        return ["go north", "focus on tin pot", "focus on tin cup", "focus on drawing", "focus on window"]


def test_a_fatal_episode_ends_in_a_misuse_at_the_step_of_the_path_that_may_be_misused() -> None:
    path = [*GOLD[:5], "focus on tin pot", *GOLD[5:9]]
    starts, ends = [], []
    for seed in range(400):
        *before, end = acted("fatal", path, seed, environment=Pots())
        looks = [action for action in before if action not in path]
        assert len(looks) <= 1
        assert [*path[: len(before) - len(looks)], *looks] == before
        starts.append(len(before) - len(looks))
        ends.append(end)
    assert max(starts) == 5
    assert 0.6 < starts.count(5) / len(starts) < 0.9
    assert set(ends) == {"focus on tin cup", "focus on drawing", "focus on window"}
    assert ends.count("focus on tin cup") > 0.55 * len(ends)  # its name is like the one of the path


LOOK = """This room is called the kitchen. In it, you see:
\tthe agent
\ta tin pot
\ta red drawing
You also see:
\tA door to the hallway (that is open)
"""


def focused(path: Sequence[str], seed: int) -> list[str]:
    """What `focus` does where every step shows the same room."""
    environment = Toy()
    environment.reset("find", 0)
    actions = collect_deviations.act_focus(environment, path, Random(seed))
    played = [next(actions)]
    with suppress(StopIteration):
        while True:
            played.append(actions.send(Step(played[-1], "", 0, False, look=LOOK, inventory="In your inventory:\n")))
    return played


def test_focus_names_what_is_out_of_view_on_the_path_and_at_last_what_is_in_view(monkeypatch) -> None:
    solutions = {("find", 3): ("focus on red drawing",), ("other", 0): ("focus on pot",)}
    monkeypatch.setattr(collect_deviations, "packed_solutions", lambda env: solutions)
    collect_deviations.focuses_of.cache_clear()
    path = [*GOLD[:5], "focus on unicorn", *GOLD[5:9]]
    in_view, ends = ("focus on tin pot", "focus on red drawing"), Counter[str]()
    asked_for = wandered = 0
    for seed in range(400):
        look, *played = focused(path, seed)
        assert look == "look around"
        tries = [action for action in played if action.startswith("focus") and action not in in_view]
        assert 1 <= len(tries) <= max(collect_deviations.ABSENT_TRIES)
        steps = [action for action in played if action in GOLD]
        assert steps == GOLD[: len(steps)]
        asked_for += "focus on unicorn" in tries
        wandered += "go to hallway" in played
        assert not set(played[:-1]) & set(in_view)
        ends[played[-1] if played[-1] in in_view else "none"] += 1
    assert asked_for > 160
    assert 120 < wandered < 200
    assert 50 < ends["none"] < 110
    assert 20 < ends["focus on tin pot"] < 80  # as likely as the drawing where no solution says what is like the goal
    assert ends["focus on red drawing"] > 220
    collect_deviations.focuses_of.cache_clear()


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("policy", collect_deviations.DEVIATIONS)
def test_collect_deviations_writes_episodes_of_the_policy(tmp_path: Path, policy: str) -> None:
    options = f"toy --split test --policy {policy} --episodes-per-task 2 --max-steps 9 --out {tmp_path}"
    assert main(["collect-deviations", *options.split()]) == 0
    episodes = [episode for path in tmp_path.glob("*.xz") for episode in read_episodes(path)]
    assert len(episodes) == 4
    assert {episode.policy for episode in episodes} == {policy}
