"""A tiny real world: rooms in a row, a bell to ring in one of them."""

from __future__ import annotations

from collections.abc import Sequence

from eval.models.imagination import Imagined
from loopwm.records.episodes import Episode, Step
from loopwm.records.template import Context

ROOMS = 6


class Corridor:
    """Variation v of either task: ring the bell in room v. Who learned room 2 can find the others by trying on."""

    name = "corridor"
    looks: tuple[str, ...] = ("look",)
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


class TrueDream:
    """An imagination that is right, with heads if asked for."""

    def __init__(self, judges: bool = False) -> None:
        self.judges = judges

    def imagine(self, env: str, contexts: Sequence[Context], actions: Sequence[str]) -> list[Imagined]:
        return [self._next(context, action) for context, action in zip(contexts, actions, strict=True)]

    def _next(self, context: Context, action: str) -> Imagined:
        world = Corridor()
        world.reset("ring", int(context.goal.split()[-1].rstrip(".")))
        for step in context.history:
            world.step(step.action)
        found = world.step(action)
        return (
            Imagined(found.observation, found.score, 0.1 if found.done else 0.9)
            if self.judges
            else Imagined(found.observation)
        )


class FalseDream:
    """An imagination where the bell rings everywhere."""

    judges = False

    def imagine(self, env: str, contexts: Sequence[Context], actions: Sequence[str]) -> list[Imagined]:
        return [Imagined("It rings." if action == "ring bell" else "You are in room 2.") for action in actions]
