"""What the collector needs of a simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol, runtime_checkable

from data_prep.environments.facts import TextFacts
from loopwm.records.episodes import Step
from loopwm.records.names import Names


class SimulatorError(RuntimeError):
    """The simulator broke down in an episode. Other episodes may still be played, with a fresh environment."""


class Declared:
    """What the project knows of an environment without starting it, beside what every `Environment` has.

    An environment inherits it and says what differs; of one that does not, these hold.
    """

    extra: ClassVar[str] = ""
    """The extra of the project that installs its packages."""

    packages: ClassVar[tuple[str, ...]] = ()
    """What it imports, inside functions."""

    names: ClassVar[Names | None] = None
    """How texts name things, for entity metrics; None leaves them out."""

    kinds: ClassVar[Path | None] = None
    """A file of names that play the same part, which tokenising may exchange; see `data_prep/renaming.py`."""

    numbered: ClassVar[bool] = False
    """Whether things are called by kind and number, such as `countertop 2`."""

    @staticmethod
    def state_queries(look: str, inventory: str) -> tuple[tuple[str, str], ...]:
        """Return pairs (action, answer): what commands that only look would answer in this state.

        Training asks them at any step, since `look` and `inventory` are recorded at each. Time that such a command
        would take is neglected. The default knows none.

        Args:
            look: the step's recorded `look`.
            inventory: the step's recorded `inventory`.
        """
        return ()

    @staticmethod
    def unreadable_line(hidden_state: str) -> str | None:
        """The first line of a hidden state that is none. Any text is one, unless it is empty."""
        return None

    @staticmethod
    def facts(texts: Sequence[str]) -> list[TextFacts]:
        """Return what each text of an episode shows and needs to have been shown before, so that training can weigh
        targets that nothing seen determines.

        texts: the distinct observations, looks, inventories and actions of an episode. By default every text is
        determined.
        """
        return [TextFacts()] * len(texts)


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


@runtime_checkable
class Prober(Environment, Protocol):
    """An environment whose texts say what a player could try."""

    def probe(self, kind: str, step: Step, rng: Random) -> list[str]:
        """Draw the actions of a probe.

        Args:
            kind: one of `data_prep/probes.py:KINDS`.
            step: the last step; what is in view and held is read from its texts.
            rng: the source of all chance.
        """
        ...
