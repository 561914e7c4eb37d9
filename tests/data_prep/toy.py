"""A made-up simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from data_prep.__main__ import main
from data_prep.environments.base import SimulatorError
from loopwm.records.episodes import Step


class Toy:
    """A world of three rooms where variation 12 breaks down always, and 7 the first time."""

    name = "toy"
    looks: tuple[str, ...] = ("look around", "inventory")
    idles: tuple[str, ...] = ("wait",)
    families: Mapping[str, tuple[str, ...]] = {"on foot": ("walk", "run")}
    solver = "gold"
    broke_before = False
    broken = 12
    solved: ClassVar[list[int | str]] = []

    def version(self) -> dict[str, str]:
        return {"toy": "1"}

    def tasks(self) -> list[str]:
        return ["walk", "run"]

    def splits(self) -> list[str]:
        return ["train", "test"]

    def variations(self, task: str, split: str) -> list[int]:
        return list(range(25)) if split == "train" else [25, 26]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        self.solved.append(variation)
        return ["north", "north", "stop", "never reached"]

    def reset(self, task: str, variation: int | str) -> Step:
        self.task, self.variation = task, variation
        return Step(None, f"{task} {variation}", 0, False)

    def goal(self) -> str:
        return "stop"

    def loaded(self) -> tuple[str, int | str]:
        return self.task, self.variation

    def hidden_state(self) -> str | None:
        return "a hidden room"

    def step(self, action: str) -> Step:
        if self.variation == self.broken or (self.variation == 7 and not Toy.broke_before):
            Toy.broke_before = True
            raise SimulatorError("broke down")
        return Step(action, f"you {action}", 100 if action == "stop" else 0, action == "stop")

    def valid_actions(self) -> list[str]:
        return ["north", "south", "focus on north"]

    def exhausted(self) -> bool:
        return False

    def close(self) -> None: ...


def collect_toy(out: Path, *options: str) -> int:
    defaults = ["--split", "train", "--policy", "noisy-expert", "--episodes-per-task", "25"]
    return main(["collect", "toy", *defaults, "--out", str(out), *options])
