"""Named selections of a suite's windows: the families that a published evaluation is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """left_out: families by environment; every window of another environment stays. source: who leaves them out."""

    left_out: Mapping[str, frozenset[str]]
    source: str

    def holds(self, env: str, family: str) -> bool:
        return family not in self.left_out.get(env, frozenset())


SELECTIONS = {
    "word2world": Selection(
        {"scienceworld": frozenset({"Grow", "Incline", "Genetics"})},
        "Word2World (arXiv:2512.18832) on AgentGym's agentenv-sciworld, whose exceptions are the tasks 5-1, 5-2, 9-1, "
        "9-2, 9-3, 10-1 and 10-2",
    )
}


def is_selection(suite: str) -> bool:
    """Whether a suite's name is `NAME:SELECTION`."""
    _, colon, selection = suite.rpartition(":")
    return bool(colon) and selection in SELECTIONS
