"""A tiny real world: rooms in a row, a bell to ring in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.agents.imagination import Imagination
from loopwm.records.episodes import Episode, Step
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, longer

ROOMS = 6


class Corridor:
    """Variation v of either task: ring the bell in room v. Who learned room 2 can find the others by trying on."""

    name = "corridor"
    looks: tuple[str, ...] = ("look",)
    families: Mapping[str, tuple[str, ...]] = {"bells": ("ring", "ring-again")}
    solver = "gold"

    def __init__(self) -> None:
        self._target = self._room = 0

    def tasks(self) -> list[str]:
        return ["ring", "ring-again"]

    def splits(self) -> list[str]:
        return ["train", "test"]

    def variations(self, task: str, split: str) -> list[int]:
        return [3, 4, 5] if split == "test" else [2]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        return ["go east"] * int(variation) + ["ring bell"]

    def reset(self, task: str, variation: int | str) -> Step:
        self._target, self._room = int(variation), 0
        return Step(None, self._sight(), 0, False)

    def goal(self) -> str:
        return f"Ring the bell in room {self._target}."

    def hidden_state(self) -> str | None:
        return None

    def step(self, action: str) -> Step:
        if action == "go east" and self._room + 1 < ROOMS:
            self._room += 1
            return Step(action, self._sight(), 0, False)
        if action == "ring bell" and self._room == self._target:
            return Step(action, "It rings.", 100, True)
        return Step(action, "Nothing happens.", 0, False)

    def valid_actions(self) -> list[str]:
        return ["go east", "ring bell"]

    def exhausted(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _sight(self) -> str:
        return f"You are in room {self._room}."


def gold_episode(room: int, policy: str = "gold", split: str = "train") -> Episode:
    world = Corridor()
    steps = [world.reset("ring", room), *map(world.step, world.gold_actions("ring", room))]
    return Episode("corridor", "ring", room, split, policy, world.goal(), tuple(steps))


class Dream:
    """Worlds that are imagined by `_next`, one row at a time."""

    def __init__(self, contexts: Sequence[Context] = ()) -> None:
        self._contexts = list(contexts)
        self.steps_cut = (0,) * len(self._contexts)

    def begin(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        return [self._next(*asked) for asked in zip(self._contexts, actions, strict=True)]

    def fork(self, rows: Sequence[int]) -> Dream:
        return type(self)([self._contexts[row] for row in rows])

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        self._contexts = [longer(*step) for step in zip(self._contexts, actions, observations, strict=True)]

    def close(self) -> None: ...

    def _next(self, context: Context, action: str) -> Imagined:
        raise NotImplementedError


class TrueDream(Dream):
    """One that is right."""

    def _next(self, context: Context, action: str) -> Imagined:
        world = Corridor()
        world.reset("ring", int(context.goal.split()[-1].rstrip(".")))
        for step in context.history:
            world.step(step.action)
        return Imagined(world.step(action).observation)


class JudgedDream(TrueDream):
    """One with reward and continuation."""

    def _next(self, context: Context, action: str) -> Imagined:
        imagined = super()._next(context, action)
        rings = imagined.observation == "It rings."
        return Imagined(imagined.observation, 100.0 if rings else 0.0, 0.1 if rings else 0.9)


class FalseDream(Dream):
    """One where the bell rings everywhere."""

    def _next(self, context: Context, action: str) -> Imagined:
        return Imagined("It rings." if action == "ring bell" else "You are in room 2.")


def dreaming(dream: type[Dream]) -> Imagination:
    return Imagination(lambda env: dream())
