"""Policies stray from the gold path as they promise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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


def test_act_noisy_after_a_detour_plans_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CARELESS", 0)
    monkeypatch.setattr(policies, "DETOURS", {"look": 1})
    environment = Marked()
    played = acted("noisy-expert", GOLD, seed=0, environment=environment)
    assert len(environment.rests) == environment.marks > 20
    for mark, rest in enumerate(environment.rests, start=1):
        after = played[played.index(f"back to {mark}") + 1 :]
        assert next(action for action in after if action in rest) == rest[0]
    assert [action for action in played if action in GOLD] == GOLD


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
