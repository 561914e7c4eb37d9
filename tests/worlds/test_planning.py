"""Candidate actions are ordered by trusted refusals and losses alone."""

from __future__ import annotations

from collections.abc import Sequence

from loopwm.records.files import PACKAGED
from loopwm.records.template import Context
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.planning import chances, imagine, order_actions, refusal_risk
from loopwm.worlds.protocol import Imagined

HALL = "This room is called the hallway. In it, you see: \n\tthe agent\n"
HALL += "You also see:\n\tA door to the kitchen (that is closed)"
START = Context("Your task is to boil water.", HALL)
REFUSED, DONE = "No known action matches that input.", "You move to the kitchen."


class Scripted:
    """Worlds whose forks answer each action by a table."""

    def __init__(self, answers: dict[str, Imagined]) -> None:
        self.answers, self.closed = answers, 0

    def fork(self, rows: Sequence[int]) -> Scripted:
        assert set(rows) == {0}
        return self

    def step(self, actions: Sequence[str]) -> list[Imagined]:
        return [self.answers[action] for action in actions]

    def close(self) -> None:
        self.closed += 1


def test_order_puts_trusted_refusals_last_and_keeps_the_rest() -> None:
    answers = {
        "a": Imagined(REFUSED, trust=0.95),
        "b": Imagined(REFUSED, trust=0.4),  # below the bound
        "c": Imagined(DONE, reward=0.0, trust=0.99),
        "d": Imagined(REFUSED, trust=0.6),
        "e": Imagined(REFUSED),  # cut: no trust
    }
    worlds = Scripted(answers)
    assert order_actions(worlds, list("abcde")) == [1, 2, 3, 4, 0]
    assert order_actions(worlds, list("abcde"), bound=0.5) == [1, 2, 4, 3, 0]
    assert order_actions(worlds, list("abcde"), bound=0.3) == [2, 4, 1, 3, 0]
    assert worlds.closed == 3


def test_the_risk_of_a_refusal_is_that_of_text_or_head() -> None:
    assert refusal_risk(Imagined(DONE, trust=0.9)) == 0
    assert refusal_risk(Imagined(DONE, trust=0.9, acceptance=0.25)) == 0.75
    assert refusal_risk(Imagined(REFUSED, trust=0.9, acceptance=0.25)) == 0.9
    assert refusal_risk(Imagined(REFUSED, acceptance=0.25)) == 0.75


def test_order_puts_losses_behind_refusals() -> None:
    answers = {
        "focus on jug": Imagined(DONE, reward=-100.0, trust=0.2),
        "go to moon": Imagined(REFUSED, reward=0.0, trust=0.99),
        "focus on cup": Imagined(DONE, reward=17.0, trust=0.9),
    }
    assert order_actions(Scripted(answers), list(answers)) == [2, 1, 0]


def test_order_of_one_action_imagines_nothing() -> None:
    assert order_actions(Scripted({}), ["go to kitchen"]) == [0]
    assert order_actions(Scripted({}), []) == []


def test_imagine_leaves_the_worlds_as_they_are() -> None:
    worlds = LocalWorlds.from_pretrained(PACKAGED)
    worlds.begin([START])
    (before,) = worlds._now
    first, second = imagine(worlds, ["open door to kitchen", "frobnicate the dax"])
    assert worlds._now == [before]
    assert first.observation == worlds.step(["open door to kitchen"])[0].observation
    assert refusal_risk(first) < 0.1 < 0.9 < refusal_risk(second)


def test_chances_are_shares_of_what_is_sampled_after_each_plan() -> None:
    worlds = LocalWorlds(WorldModel.from_pretrained(PACKAGED), max_new_tokens=8)
    worlds.begin([START])
    plans = [["open door to kitchen", "go to kitchen"], ["look around"], ["look around"]]

    def mentions(text: str) -> bool:
        return "cupboard" in text or "open" in text

    chances_of_plans = chances(worlds, plans, mentions, samples=4)
    assert chances(worlds, plans, mentions, samples=4) == chances_of_plans  # the worlds stay, the seed decides
    assert all(chance in (0, 0.25, 0.5, 0.75, 1) for chance in chances_of_plans)
    alone = worlds.fork([0])
    for action in plans[0]:
        alone.step([action], decode=False)
    drawn_texts = alone.sample(4)[0]
    assert chances(worlds, plans[:1], mentions, samples=4) == [sum(map(mentions, drawn_texts)) / 4]
    assert chances(worlds, plans, lambda text: True, samples=4) == [1, 1, 1]
    assert chances(worlds, [], mentions) == []


def test_samples_of_a_row_are_of_its_step() -> None:
    worlds = LocalWorlds(WorldModel.from_pretrained(PACKAGED), max_new_tokens=8)
    worlds.begin([START, START])
    worlds.step(["look around", "inventory"], decode=False)
    rooms, inventories = worlds.sample(3)
    assert all("room" in text for text in rooms)
    assert all("inventory" in text for text in inventories)
