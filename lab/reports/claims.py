"""Verdicts on claims of the papers, computed from bars over stored tables.

A claim names its table (`copied/NAME.json`) and an expression for each verdict that can be true of it; otherwise it is
not resolved. Expressions read cells by row and column: `cell(..)` returns the numbers outside of parentheses,
`bounds(..)` those inside. Other claims have a typed verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwm.records.errors import InputError
from loopwm.records.files import read_json

NOT_RESOLVED = "not resolved"
VERDICTS = ("reproduced", "contradicted", NOT_RESOLVED)
_NUMBER = re.compile(r"(?<![\w.])(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
_INSIDE = re.compile(r"\(([^()]*)\)")


@dataclass(frozen=True)
class Table:
    """Table of a stored result."""

    name: str
    columns: list[str]
    rows: list[list[str]]

    @classmethod
    def read(cls, data: Path, name: str) -> Table:
        return cls(name, **read_json(data / "copied" / f"{name}.json")["table"])

    def cell(self, row: str, column: str) -> list[float]:
        return _numbers(_INSIDE.sub("", self._text(row, column)))

    def bounds(self, row: str, column: str) -> list[float]:
        return _numbers(" ".join(_INSIDE.findall(self._text(row, column))))

    def across(self, row: str, *columns: str) -> list[float]:
        """Return the numbers of several cells of a row, of all but the first without names."""
        return [number for column in columns or self.columns[1:] for number in self.cell(row, column)]

    def like(self, beginning: str) -> list[str]:
        """Return the first cells with a beginning, for instance the seeds of an arm."""
        return [cells[0] for cells in self.rows if cells[0].startswith(beginning)]

    def _text(self, row: str, column: str) -> str:
        for cells in self.rows:
            if cells[0] == row and column in self.columns:
                return cells[self.columns.index(column)]
        raise InputError(f"{self.name}: must have the row {row!r} and the column {column!r}")


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def verdict(claim: Mapping[str, Any], data: Path) -> str:
    """Return the verdict on a claim.

    Raises:
        InputError: a typed verdict is unknown, bars of two verdicts are reached, or a bar cannot be computed
    """
    if "bars" not in claim:
        if claim["verdict"] not in VERDICTS:
            raise InputError(f"{claim['claim']}: verdict: must be one of {', '.join(VERDICTS)}, got {claim['verdict']}")
        return str(claim["verdict"])
    table = Table.read(data, claim["table"])
    functions: dict[str, Callable[..., Any]] = {f.__name__: f for f in (all, any, len, max, min, sum, zip)}
    names = {**functions, "cell": table.cell, "bounds": table.bounds, "across": table.across, "like": table.like}
    reached = [name for name, bar in claim["bars"].items() if eval(bar, {"__builtins__": {}, **names})]
    if len(reached) > 1 or not set(claim["bars"]) <= set(VERDICTS):
        raise InputError(f"{claim['claim']}: bars must be of one verdict at most, got {', '.join(claim['bars'])}")
    return reached[0] if reached else NOT_RESOLVED
