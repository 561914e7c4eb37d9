"""Imagined environments that look at a real one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from lab.agents import text_gym
from lab.agents.anchored import AnchoredTextEnv, AnchoredWorlds
from loopwm.records.template import Context, Transition
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import Imagined
from tests.lab.agents import test_text_gym
from tests.worlds.test_gym import Echoes

TOKENS = 12
KITCHEN = Context("boil water", "This is the kitchen.", (Transition("wait", "Nothing happens."),))
HALL = Context("find a tree", "This is the hall.")


@pytest.fixture
def worlds(library) -> LocalWorlds:
    return LocalWorlds(library, max_new_tokens=TOKENS)


class Lamp(gymnasium.Env[str, str]):
    """A real environment: a lamp is switched on or not, and smashing it is the end."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.on, self.taken = False, 0
        return "It is dark.", {"goal": "make light", "admissible": ["switch", "smash"], "task": "lamp"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        self.on ^= action == "switch"
        smashed = action == "smash"
        seen = "Splinters." if smashed else "Light!" if self.on else "It is dark."
        return seen, float(self.on), smashed, False, {"admissible_commands": [] if smashed else ["switch", "smash"]}


gymnasium.register("test/Lamp-v0", entry_point=Lamp)


class Certain(Echoes):
    """Echoes that remember what they were told. One that says "end" imagines its end."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        return [Imagined(f"imagined {action}", 7.0, 0.1 if action == "end" else 0.9) for action in actions]

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        self.told += zip(actions, observations, strict=True)


def anchored(*actions: str, every: int = 2) -> tuple[Certain, Lamp, list[Any]]:
    """Steps up to the end: observation, reward, end, whether it is real, admissible actions."""
    worlds, lamp = Certain(), Lamp()
    env = AnchoredTextEnv(worlds, lamp, every)
    env.reset(seed=0)
    steps = []
    for action in actions:
        seen, reward, terminated, truncated, info = env.step(action)
        assert not truncated
        assert info["predicted"] != info["real"]
        steps.append((seen, reward, terminated, info["real"], info["admissible"]))
    return worlds, lamp, steps


def test_every_few_steps_a_real_environment_says_what_really_happened():
    env = AnchoredTextEnv(Certain(), "test/Lamp-v0")
    seen, info = env.reset(seed=0)
    assert (seen, info["goal"], info["task"]) == ("It is dark.", "make light", "lamp")
    assert (info["real"], info["admissible"]) == (True, ("switch", "smash"))
    worlds, lamp, steps = anchored("switch", "wait", "switch")
    assert steps == [
        ("imagined switch", 7.0, False, False, None),
        ("Light!", 1.0, False, True, ("switch", "smash")),
        ("imagined switch", 7.0, False, False, None),
    ]
    assert worlds.told == [("switch", "Light!"), ("wait", "Light!")]
    assert lamp.taken == 2


def test_the_real_environment_decides_about_the_end():
    worlds, lamp, steps = anchored("end", "smash", "wait")
    assert steps[0] == ("It is dark.", 0.0, False, True, ("switch", "smash"))  # was imagined, and was none
    assert steps[1][:4] == ("imagined smash", 7.0, False, False)
    assert steps[2] == ("Splinters.", 0.0, True, True, ())
    assert lamp.taken == 2
    assert worlds.told[-2:] == [("smash", "Splinters."), ("wait", "Splinters.")]


def test_looking_cuts_the_drift_of_a_world(library, worlds, worlds_client):
    """After a look the world is one that has really seen all that, here and in a service."""
    client = Client(str(worlds_client.base_url))
    for kept in (worlds, HttpWorlds(client, "tiny", max_new_tokens=TOKENS)):
        rows = AnchoredWorlds(kept, [Lamp(), Lamp()], every=2)
        starts = [lamp.reset()[0] for lamp in rows._reals]
        rows.begin([Context("make light", start) for start in starts])
        rows.step(["switch", "wait"])
        told = rows.step(["wait", "smash"])
        assert [(one.observation, one.continuation) for one in told] == [("Light!", 1.0), ("Splinters.", 0.0)]
        seen = Context("make light", "It is dark.", (Transition("switch", "Light!"), Transition("wait", "Light!")))
        fresh = library.advance(library.encode([seen]), ["look around"])
        going, _ = kept.step(["look around"] * 2)
        assert going.observation == library.decode(fresh, TOKENS)[0]
        assert rows.step(["wait"] * 2)[1] == told[1]  # an end stands
        rows.close()


def test_an_environment_that_is_put_right_keeps_gymnasiums_contract(worlds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(AnchoredTextEnv(worlds, Lamp(), render_mode="ansi"), skip_render_check=True)
    with pytest.raises(ValueError, match="every"):
        AnchoredTextEnv(worlds, Lamp(), every=0)
    with pytest.raises(ValueError, match="must have the goal"):
        AnchoredTextEnv(worlds, echoing_without_goal()).reset()


def echoing_without_goal() -> gymnasium.Env[str, str]:
    lamp = Lamp()
    lamp.reset = lambda **_: ("It is dark.", {})  # type: ignore[method-assign]
    return lamp


class Nowhere:
    def begin(self, contexts: Sequence[Context]) -> None:
        self.contexts = contexts

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        return [Imagined("nowhere")] * len(actions)

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_simulator_puts_an_imagined_environment_right(monkeypatch):
    monkeypatch.setattr(text_gym, "make_environment", lambda name: test_text_gym.Ladder())
    env = AnchoredTextEnv(Nowhere(), text_gym.TextEnv("ladder", admissible=True), every=2)
    assert env.reset(seed=0)[1]["admissible"] == ("up", "wait")
    seen: list[Any] = [env.step("up") for _ in range(2)]
    assert [step[:3] for step in seen] == [("nowhere", 0.0, False), ("rung 2", 50.0, True)]
    assert seen[1][4]["admissible"] == ("up", "wait")
