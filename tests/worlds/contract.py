"""Promises of the worlds' protocol, kept by every kind: modules with a fixture `make` import and so run these tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loopwm.records.template import Context, FormatError, Transition
from loopwm.worlds.protocol import Worlds

TOKENS = 12
KITCHEN = Context("boil water", "This is the kitchen.", (Transition("wait", "Nothing happens."),))
HALL = Context("find a tree", "This is the hall.", look="A hall.", inventory="An orange.")

MakeWorlds = Callable[[], Worlds]


def close_to(steps):
    def close(number, rel, **more):
        return None if number is None else pytest.approx(number, rel=rel, **more)

    return [
        (
            step.observation,
            step.finish,
            close(step.reward, 1e-4),
            close(step.continuation, 1e-4),
            close(step.trust, 1e-3),
            close(step.acceptance, 1e-4),
            close(step.expected_reward, 1e-4, abs=1e-4),
        )
        for step in steps
    ]


def told(steps):
    names = ("observation", "finish", "reward", "continuation", "trust", "acceptance", "expected_reward")
    return [tuple(getattr(step, name) for name in names) for step in steps]


def test_a_fork_goes_its_own_way(make):
    worlds = make()
    worlds.begin([KITCHEN, HALL])
    fork = worlds.fork([1, 0, 1])
    apart = fork.step(["wait", "wait", "look around"])
    fresh = make()
    fresh.begin([HALL, KITCHEN])
    together = fresh.step(["wait", "wait"])
    assert told(apart[:2]) == close_to(together)
    assert told(worlds.step(["wait", "wait"])) == close_to(together[::-1])


def test_what_was_observed_takes_the_place_of_what_was_imagined(make):
    worlds, fresh = make(), make()
    worlds.begin([HALL, KITCHEN])
    worlds.step(["look around", "wait"])
    worlds.observe(["open door", "wait"], ["It is open.", "Nothing."])
    fresh.begin([
        replace(HALL, history=(Transition("open door", "It is open."),)),
        replace(KITCHEN, history=(*KITCHEN.history, Transition("wait", "Nothing."))),
    ])  # fmt: skip
    assert told(worlds.step(["wait", "wait"])) == close_to(fresh.step(["wait", "wait"]))


def test_an_observation_over_the_limit_drops_the_oldest_steps(make, library, monkeypatch):
    monkeypatch.setattr(library.model.config, "context_tokens", 60)
    worlds = make()
    worlds.begin([HALL])
    for _ in range(6):
        worlds.observe(["go to the other room"], ["This is the hall again."])
    assert worlds.steps_cut[0] > 0
    assert worlds.step(["wait"])[0].finish == "length"


def test_a_text_that_is_cut_and_a_world_that_is_full_are_told(make):
    worlds, long = make(), "carry it on " * 150
    worlds.begin([HALL])
    steps = [worlds.step([long])[0] for _ in range(12)]
    finishes = [step.finish for step in steps]
    full = finishes.index("full")
    assert set(finishes[:full]) <= {"stop", "length"}
    assert all(finish == "full" for finish in finishes[full:])
    assert steps[full].observation == ""


def test_a_fork_observes_from_the_last_real_step(make):
    worlds, fresh = make(), make()
    worlds.begin([HALL])
    worlds.step(["look around"])
    fork = worlds.fork([0])
    fork.observe(["open door"], ["It is open."])
    fresh.begin([replace(HALL, history=(Transition("open door", "It is open."),))])
    assert told(fork.step(["wait"])) == close_to(fresh.step(["wait"]))


def test_lists_of_another_length_and_rows_that_are_not_there_are_named(make):
    worlds = make()
    worlds.begin([KITCHEN, HALL])
    with pytest.raises(FormatError, match="rows: must be 0 to 1, got 2"):
        worlds.fork([0, 2])
    with pytest.raises(FormatError, match="actions: must be 2, one a world, got 1"):
        worlds.observe(["wait"], ["Nothing happens.", "Nothing happens."])
    with pytest.raises(FormatError, match="observations: must be 2, one a world, got 0"):
        worlds.observe(["wait", "wait"], [])
    with pytest.raises(FormatError, match="actions: must be 2, one a world, got 1"):
        worlds.step(["wait"])
    worlds.close()


def test_worlds_text_in_place_of_a_list_is_named(make):
    worlds = make()
    worlds.begin([KITCHEN])
    with pytest.raises(FormatError, match="actions: must be a list of str, one a world, got 'wait'"):
        worlds.step("wait")
    with pytest.raises(FormatError, match=r"contexts: must be a list of Context, one a world, got \['text'\]"):
        worlds.begin(["text"])
    worlds.close()
