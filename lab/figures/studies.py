"""Sources of studies: their stored differences, and copies of tables whose runs are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwm.records.errors import InputError


class Percent(float):
    """A share in per cent, shown with one decimal."""


@dataclass(frozen=True)
class Difference:
    """Mean difference in points and its 95 % bounds; where known, what was compared over n items, in per cent."""

    mean: float
    low: float
    high: float
    a: Percent | None = None
    b: Percent | None = None
    n: int = 0

    def __str__(self) -> str:
        # Adding 0.0 turns -0.0 into 0.0.
        mean, low, high = (round(value, 1) + 0.0 for value in (self.mean, self.low, self.high))
        return f"{mean:+.1f} ({low:.1f} to {high:.1f})" if mean else f"0.0 ({low:.1f} to {high:.1f})"

    @property
    def cell(self) -> str:
        return f"{self}, {self.verdict}"

    @property
    def verdict(self) -> str:
        """Return `above`, `below`, or `level` if the bounds include zero."""
        return "above" if self.low > 0 else "below" if self.high < 0 else "level"


class Differences:
    """Differences of a reference from other arms, as studies store them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._differences = {row["arm"]: row for row in rows}

    def minus(self, arm: str) -> Difference:
        """Return the difference of the reference and an arm."""
        row = self._differences[arm]
        return Difference(*(100 * row[name] for name in ("difference", "low", "high")))

    def by_seed(self, arm: str) -> list[float]:
        return [100 * value for value in self._differences[arm]["by_seed"]]


class PixelStudy(Differences):
    """Stored result of `lab pixels looping`."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        super().__init__(stored["differences"])
        self._arms, self._right = stored["arms"], stored["right"]

    def right(self, arm: str) -> list[Percent]:
        """Return what is right by seed."""
        return [Percent(100 * share) for share in self._right[arm]]

    def parameters(self, arm: str) -> int:
        return int(self._arms[arm][0]["parameters"])

    def flops(self, arm: str) -> int:
        return int(self._arms[arm][0]["flops"])


class Study(Differences):
    """Stored result of a study.

    copied: its own results are lost and it was copied from a page. Raises InputError if it is not so.
    """

    def __init__(self, stored: Mapping[str, Any], *, copied: bool) -> None:
        if copied != ("transcribed" in stored):
            raise InputError(f"study {stored['study']}: must be named {'study' if copied else 'copied_study'}")
        super().__init__(stored["differences"])
        self.windows, self.seeds = stored["windows"], stored["seeds"]
        self._costs = {row["arm"]: row for row in stored["costs"]}

    def em(self, arm: str) -> float:
        return 100 * float(self._costs[arm]["em"])

    def mflops(self, arm: str) -> float:
        return float(self._costs[arm]["mflops"])


@dataclass(frozen=True)
class Copy:
    """Table of an earlier version of a page, where the runs' own results are lost."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def at(self, row: str, column: str, index: int = 0) -> float:
        """Return a number of the cell in a row, named by its first cell. Raises InputError without them."""
        from lab.figures.marks import NUMBER  # marks import this module

        for cells in self.rows:
            if cells[0] == row and column in self.columns:
                return float(NUMBER.findall(cells[list(self.columns).index(column)])[index].replace(",", ""))
        raise InputError(f"{row}, {column}: must be a row and a column of the copied table")
