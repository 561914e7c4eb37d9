"""Policies stray from the gold path as they promise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest

from data_prep import policies
from data_prep.environments.base import Environment
from data_prep.policies import POLICIES
from loopwm.records.episodes import Step
from tests.fixtures.toy import Toy

GOLD: Sequence[str] = [f"gold {i}" for i in range(200)]


def acted(policy: str, gold: Sequence[str], seed: int, environment: Environment | None = None) -> list[str]:
    """What a policy does where every step is told the same."""
    actions = POLICIES[policy].act(environment or Toy(), gold, Random(seed))
    played = [next(actions)]
    with suppress(StopIteration):
        while True:
            played.append(actions.send(Step(played[-1], "you did", 0, False)))
    return played


def test_noise_keeps_the_gold_path_and_strays_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CARELESS", 0)
    played = acted("noisy-expert", GOLD, seed=0)
    rest = iter(played)
    assert all(action in rest for action in GOLD)  # in this order
    assert 0.15 < 1 - len(GOLD) / len(played) < 0.8
    assert {"look around", "north", "south", "wait"} <= set(played)


def test_only_a_share_of_noisy_episodes_slips_fatally() -> None:
    slips = [sum(a == "focus on north" for a in acted("noisy-expert", GOLD[:20], seed)) for seed in range(400)]
    assert set(slips) == {0, 1}
    assert 0.04 < sum(slips) / len(slips) < 0.1


class Marked(Toy):
    """Every place has a mark, from which its path is found again."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = 0
        self.rests: list[Sequence[str]] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def plan(self, mark: int, rest: Sequence[str]) -> list[str]:
        self.rests.append(rest)
        return [f"back to {mark}", *rest]


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
        assert back - start - 1 <= policies.LONGEST_CARELESS
    kept = [action for action in played if action in GOLD]
    assert list(dict.fromkeys(sorted(kept, key=GOLD.index))) == GOLD


def test_the_other_action_of_a_fork_is_never_the_paths() -> None:
    walk = policies.Walk(Toy(), Random(0))
    others = {walk.other_action(["north"], policies.FORK.kinds) for _ in range(200)}
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
        assert back - start - 1 in policies.OMISSION.lengths


def test_later_steps_are_tried_where_they_do_not_belong_and_then_the_path_is_found_again() -> None:
    steps = ("go to", "take", "fill", "focus on", "drop")
    path = [f"{step} {i}" for i in range(40) for step in steps]
    environment = Marked()
    played = acted("ahead", path, seed=3, environment=environment)
    start = elsewhere = 0
    for mark, (left, then) in enumerate(pairwise([*environment.rests, []]), start=1):
        back = played.index(f"back to {mark}")
        tried = [action for action in played[start:back] if action in path]
        assert len(tried) <= max(*policies.TRIES, policies.LONGEST_CARELESS)
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
        assert 1 <= len(changes) <= max(policies.CHANGES)
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


def test_a_number_is_said_when_one_is_asked_for_and_only_then() -> None:
    actions = POLICIES["noisy-expert"].act(Toy(), ["pick up red cup", "0", "go north"], Random(1))
    asked, wrong = False, 0
    action: str | None = next(actions)
    with suppress(StopIteration):
        while action is not None:
            wrong += action.isdecimal() != asked
            asked = "cup" in action
            told = "Ambiguous request: Please enter the number:\n0:\ta\n1:\tb\n" if asked else "done"
            action = actions.send(Step(action, told, 0, False))
    assert wrong == 0
