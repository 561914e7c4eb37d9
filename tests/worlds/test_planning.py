"""Actions are ordered by trusted refusals and losses alone; plans are weighed by expected points."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loopwm.records.files import PACKAGED
from loopwm.records.template import Context, FormatError, Transition
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.planning import Plan, beam_search, best_plan, chances, imagine, order_actions, refusal_risk
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


class Tree:
    """Worlds whose rows answer by the path of actions so far; a path without an answer is carried out for nothing."""

    steps_cut = ()

    def __init__(self, answers: dict[str, Imagined], paths: Sequence[str] = ("",), root: Tree | None = None) -> None:
        self.answers, self.paths = answers, list(paths)
        self.root, self.open = root or self, 0

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None: ...

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None: ...

    def fork(self, rows: Sequence[int]) -> Tree:
        self.root.open += 1
        return Tree(self.answers, [self.paths[row] for row in rows], self.root)

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        assert actions
        places = range(len(self.paths)) if rows is None else rows
        for row, action in zip(places, actions, strict=True):
            self.paths[row] += action
        return [self.answers.get(self.paths[row], Imagined(DONE, 0.0, 1.0, trust=0.9)) for row in places]

    def close(self) -> None:
        self.root.open -= 1


PAYS = {
    "ab": Imagined(DONE, 10.0, 1.0, trust=0.9),  # 10 * 0.9 * 0.9 = 8.1
    "cd": Imagined(DONE, 100.0, 0.0, trust=0.05),  # 100 * 0.9 * 0.05 = 4.5
    "e": Imagined(REFUSED, 0.0, 1.0, trust=0.9),
    "ef": Imagined(DONE, 50.0, 1.0, trust=0.9),  # behind a refusal
    "g": Imagined(DONE, -5.0, 1.0, trust=0.9),
}


def test_the_best_plan_weighs_points_by_trust_and_stops_at_a_refusal() -> None:
    tree = Tree(PAYS)
    assert best_plan(tree, ["cd", "ab", "ef", "g"]) == 1
    assert best_plan(tree, ["cd", "ef"]) == 0
    assert (tree.paths, tree.open) == ([""], 0)


def test_no_plan_is_best_where_none_brings_more_than_asked_for() -> None:
    assert best_plan(Tree(PAYS), ["ef", "g", "a"]) is None
    assert best_plan(Tree(PAYS), ["ab"], least=8.0) == 0
    assert best_plan(Tree(PAYS), ["ab"], least=8.2) is None
    assert best_plan(Tree(PAYS), []) is None


def test_plans_of_unequal_lengths_are_imagined_to_their_ends() -> None:
    answers = {"xyz": Imagined(DONE, 3.0, 1.0, trust=1.0), "w": Imagined(DONE, 1.0, 1.0, trust=1.0)}
    assert best_plan(Tree(answers), ["w", "xyz"]) == 1


def test_a_text_that_was_cut_brings_nothing() -> None:
    plan = Plan().after("a", Imagined(DONE, 10.0, finish="length"))
    assert (plan.points, plan.chance, plan.over) == (0, 0, False)
    assert Plan().after("a", Imagined("", finish="full")).over
    assert Plan().after("a", Imagined(DONE, 0.0, trust=0.5)) == Plan((Transition("a", DONE),), 0, 0.5)
    assert Plan().after("a", Imagined(DONE, 100.0, 0.1, trust=0.5)).over
    assert Plan().after("a", Imagined(DONE, 10.0, trust=0.1, acceptance=0.8)).points == 8
    assert Plan().after("a", Imagined(DONE, 50.0, trust=0.9, acceptance=0.4)).points == 0
    assert Plan().after("a", Imagined(REFUSED, 50.0, trust=0.9, acceptance=0.9)).points == 0


def test_a_step_that_most_likely_pays_and_may_lose_all_is_worth_the_mean() -> None:
    risky = Imagined(DONE, 50.0, trust=0.5, acceptance=1.0, expected_reward=-4.0)
    assert Plan().after("focus on cup", risky).points == -4
    sure = Imagined(DONE, 2.0, trust=0.5, acceptance=1.0, expected_reward=2.0)
    assert best_plan(Tree({"a": risky, "b": sure}), ["a", "b"]) == 1


def test_worlds_without_rewards_are_refused() -> None:
    silent = Tree({"a": Imagined(DONE, trust=0.9)})
    for plan in (lambda: best_plan(silent, ["a"]), lambda: beam_search(silent, lambda steps: "a")):
        with pytest.raises(FormatError, match="worlds: must predict rewards"):
            plan()
    assert silent.open == 0


def proposed(steps: Sequence[Transition]) -> Sequence[str]:
    return "" if len(steps) > 1 else "abcdefg"


def test_beam_search_finds_the_plan_with_the_most_expected_points() -> None:
    tree = Tree(PAYS)
    plan = beam_search(tree, proposed, width=7, depth=2)
    assert [step.action for step in plan.steps] == ["a", "b"]
    assert plan.points == pytest.approx(10 * 0.9 * 0.9)
    assert (tree.paths, tree.open) == ([""], 0)


def test_a_beam_continues_the_surest_plans_and_as_many_as_it_is_wide() -> None:
    answers = {"c": Imagined(DONE, 0.0, 1.0, trust=0.99), "cd": Imagined(DONE, 1.0, 1.0, trust=0.99), **PAYS}
    del answers["ab"]
    assert [step.action for step in beam_search(Tree(answers), proposed, width=1, depth=2).steps] == ["c", "d"]
    assert beam_search(Tree(PAYS), proposed, width=1, depth=1) == Plan()


def test_beam_search_stays_where_nothing_is_proposed_or_expected() -> None:
    assert beam_search(Tree(PAYS), lambda steps: [], width=2, depth=3) == Plan()
    assert beam_search(Tree({}), proposed, width=2, depth=3) == Plan()
    assert beam_search(Tree(PAYS), lambda steps: "e" if not steps else "f", width=2, depth=3) == Plan()
