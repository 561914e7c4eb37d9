"""What the collector needs of a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loopwm.records.episodes import Step


class SimulatorError(RuntimeError):
    """The simulator broke down in an episode. Other episodes may still be played, with a fresh environment."""


class Environment(Protocol):
    """One simulator. `reset` before anything that speaks of the world."""

    name: str
    looks: tuple[str, ...]
    """Commands that only look."""

    idles: tuple[str, ...]
    """Commands that do nothing but let time pass."""

    families: Mapping[str, tuple[str, ...]]
    """Tasks that are reported together, by the family's name; every task is in one."""

    solver: str
    """Name of the policy that plays the environment's own solution: gold, or expert if it searches as a player."""

    def version(self) -> dict[str, str]:
        """The simulator's packages with their versions, and what was changed in them."""
        ...

    def tasks(self) -> list[str]:
        """All tasks, in the simulator's order."""
        ...

    def splits(self) -> list[str]: ...

    def variations(self, task: str, split: str) -> list[int] | list[str]:
        """The variations (or games) of a split, in the simulator's order."""
        ...

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        """The simulator's own solution. Leaves no world behind: `reset` before the first step."""
        ...

    def reset(self, task: str, variation: int | str) -> Step:
        """Starts a variation and returns the first observation."""
        ...

    def goal(self) -> str: ...

    def loaded(self) -> tuple[str, int | str]:
        """Task and variation of the world that answers now."""
        ...

    def hidden_state(self) -> str | None:
        """What the agent cannot see, now; null where the environment does not tell."""
        ...

    def step(self, action: str) -> Step: ...

    def valid_actions(self) -> list[str]:
        """All actions that make sense now. May cost more than a step."""
        ...

    def exhausted(self) -> bool:
        """Whether a fresh environment should take over before the next episode, for lack of memory."""
        ...

    def close(self) -> None: ...
