"""Disturbed worlds: what is shown, what the world is told, and the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import pytest

from loopwm.records.template import Context, FormatError
from loopwm.worlds import gym
from loopwm.worlds.perturbed import KINDS, Change, PerturbedWorlds, things_in, with_things, without
from loopwm.worlds.protocol import Imagined

START = Context("put a mug in shelf.", "You are in a room. Looking around you, you see a desk 1, and a shelf 1.")
DESK = "You arrive at desk 1. On the desk 1, you see a mug 1, a pen 2, and a book 1."
SHELF = "You arrive at shelf 1. On the shelf 1, you see a vase 3."
TAKEN = "You pick up the mug 1 from the desk 1."
ANSWERS = {"go to desk 1": DESK, "go to shelf 1": SHELF, "take mug 1 from desk 1": TAKEN}


class Scripted:
    """Worlds that answer each action by a table, and note the contexts of rows that begin anew."""

    steps_cut = ()

    def __init__(self, told: list[tuple[int, Context]] | None = None) -> None:
        self.told = [] if told is None else told
        self.taken: list[str] = []

    def begin(self, contexts: Sequence[Context]) -> None:
        self.rows = len(contexts)

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        self.told += zip(rows, contexts, strict=True)

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        self.taken += actions
        return [Imagined(ANSWERS[action], 1.0, 0.5, trust=0.9, acceptance=0.8) for action in actions]

    def fork(self, rows: Sequence[int]) -> Scripted:
        return Scripted(self.told)

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def disturbed(*kinds: str, rate: float = 1, seed: int = 0, rows: int = 1) -> tuple[PerturbedWorlds, Scripted]:
    scripted = Scripted()
    worlds = PerturbedWorlds(scripted, rate, seed, kinds)  # type: ignore[arg-type]  # names of kinds
    worlds.begin([START] * rows)
    return worlds, scripted


def shown(worlds: PerturbedWorlds, action: str) -> str:
    return worlds.step([action])[0].observation


def stop(worlds: PerturbedWorlds) -> None:
    """Disturb nothing from here on."""
    worlds._rate = 0


def test_a_refusal_takes_the_place_of_the_step_and_the_world_is_told() -> None:
    worlds, scripted = disturbed("refuse")
    assert worlds.step(["go to desk 1"]) == [Imagined("Nothing happens.", 0.0, 1.0, acceptance=0.0)]
    assert worlds.ledger == [[Change(1, "refuse")]]
    ((row, context),) = scripted.told
    assert (row, context.history[-1].observation) == (0, "Nothing happens.")
    stop(worlds)
    assert worlds.step(["go to desk 1"]) == [Imagined(DESK, 1.0, 0.5, trust=0.9, acceptance=0.8)]
    assert len(scripted.told) == 1


def test_a_broken_thing_is_refused_for_ever_and_others_are_not() -> None:
    worlds, _ = disturbed("break")
    assert shown(worlds, "go to desk 1") == "Nothing happens."
    assert worlds.ledger == [[Change(1, "break", "desk 1")]]
    stop(worlds)
    assert shown(worlds, "take mug 1 from desk 1") == "Nothing happens."
    assert shown(worlds, "go to shelf 1") == SHELF
    assert len(worlds.ledger[0]) == 1


def test_a_hidden_thing_is_gone_and_cannot_be_taken() -> None:
    worlds, scripted = disturbed("hide", seed=1)
    text = shown(worlds, "go to desk 1")
    (change,) = worlds.ledger[0]
    assert (change.kind, things_in(text)) == ("hide", [t for t in ("mug 1", "pen 2", "book 1") if t != change.thing])
    assert scripted.told[-1][1].history[-1].observation == text
    stop(worlds)
    assert shown(worlds, "go to desk 1") == text
    worlds._rows[0].ledger[0] = Change(1, "hide", "mug 1")
    assert shown(worlds, "take mug 1 from desk 1") == "Nothing happens."


def test_a_moved_thing_is_shown_in_the_next_list_and_only_once() -> None:
    worlds, scripted = disturbed("move")
    first = shown(worlds, "go to desk 1")
    ((step, kind, thing, _),) = worlds.ledger[0]
    assert (step, kind) == (1, "move")
    assert thing not in first
    stop(worlds)
    worlds._rows[0].moving = ["mug 1"]
    assert shown(worlds, "take mug 1 from desk 1") == "Nothing happens."
    worlds._rows[0].moving = [thing]
    scripted.told.pop()
    second = shown(worlds, "go to shelf 1")
    assert second == f"You arrive at shelf 1. On the shelf 1, you see a {thing}, and a vase 3."
    assert [context.history[-1].observation for _, context in scripted.told] == [first, second]
    assert shown(worlds, "go to shelf 1") == SHELF


def test_a_new_name_stands_in_observations_and_is_understood() -> None:
    worlds, scripted = disturbed("rename")
    text = shown(worlds, "go to desk 1")
    (change,) = worlds.ledger[0]
    assert text == DESK.replace(change.thing, change.to)
    assert scripted.told == []
    stop(worlds)
    worlds._rows[0].ledger[0] = Change(1, "rename", "mug 1", "odd mug 1")
    assert shown(worlds, "take odd mug 1 from desk 1") == TAKEN.replace("mug 1", "odd mug 1")
    assert scripted.taken[-1] == "take mug 1 from desk 1"


def test_the_seed_decides_and_rows_differ() -> None:
    def play(seed: int) -> list[list[Change]]:
        worlds, _ = disturbed(*KINDS, rate=0.5, seed=seed, rows=4)
        for _ in range(5):
            worlds.step(["go to desk 1"] * 4)
        return worlds.ledger

    assert play(3) == play(3) != play(4)
    assert len({str(ledger) for ledger in play(3)}) == 4


def test_a_fork_goes_on_as_its_row_would_and_leaves_it_alone() -> None:
    worlds, _ = disturbed(*KINDS, rate=0.5, seed=7)
    worlds.step(["go to desk 1"])
    fork, before = worlds.fork([0]), worlds.ledger
    texts = [fork.step(["go to desk 1"])[0].observation for _ in range(6)]
    assert worlds.ledger == before
    assert [shown(worlds, "go to desk 1") for _ in range(6)] == texts
    assert fork.ledger == worlds.ledger


def test_what_is_observed_follows_the_last_real_step() -> None:
    worlds, scripted = disturbed("refuse")
    shown(worlds, "go to desk 1")
    worlds.observe(["go to shelf 1"], [SHELF])
    ((_, context),) = scripted.told[1:]
    assert [step.observation for step in context.history] == [SHELF]
    shown(worlds, "go to desk 1")
    assert [step.observation for step in scripted.told[-1][1].history] == [SHELF, "Nothing happens."]


def test_lists_of_both_worlds_lose_and_gain_a_thing() -> None:
    room = "In it, you see: \n\tthe agent\n\tan orange\n\ta jug (containing nothing)\n\ta painting\nYou also see:"
    assert things_in(room) == ["orange", "painting"]
    assert without(room, "orange") == room.replace("\tan orange\n", "")
    assert with_things(room, ["axe"]) == room.replace("\tan orange\n", "\tan axe\n\tan orange\n")
    assert without(SHELF, "vase 3").endswith("you see nothing.")
    assert without(DESK, "book 1").endswith("you see a mug 1, and a pen 2.")
    assert with_things(SHELF, ["egg 1", "mug 1"]).endswith("you see an egg 1, a mug 1, and a vase 3.")
    assert without(DESK, "mug") == DESK


def test_registered_environments_are_disturbed_in_their_own_words() -> None:
    assert gym
    for world, refusal in (("ALFWorld", "Nothing happens."), ("ScienceWorld", "No known action matches that input.")):
        env = gymnasium.make(f"loopwm/{world}-v0", max_new_tokens=4, perturb=1.0)
        env.reset(seed=0)
        worlds = env.unwrapped._worlds  # type: ignore[attr-defined]
        texts = [env.step("look around")[0] for _ in range(6)]
        refusals = sum(change.kind == "refuse" for change in worlds.ledger[0])
        assert texts.count(refusal) >= refusals > 0
        env.close()


@pytest.mark.parametrize(
    ("rate", "kinds", "line"),
    [(1.5, KINDS, "rate: must be in [0, 1], got 1.5"), (0.1, ("melt",), "got melt"), (0.1, (), "got none")],
)
def test_rates_and_kinds_that_are_none_are_named(rate: float, kinds: tuple[str, ...], line: str) -> None:
    with pytest.raises(FormatError, match=line.replace("[", r"\[").replace("]", r"\]")):
        disturbed(*kinds, rate=rate)
