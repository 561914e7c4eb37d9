"""Figures of a page, and the marks beside them that say how to recompute them.

A mark is an HTML comment behind a paragraph, list item or table. Behind text it has an expression (`sources.py`) for
each number of the text, in order; `_` leaves one out, `...` all others:

    <!-- figures: scienceworld_500.em(1); _; ... -->

Behind a table it has a line for `rows`, an expression each (null: none), and one for each column that is recomputed.
A row that needs other columns is a mapping with the key `row`:

    <!-- figures:
    rows: [scienceworld_500, {row: scienceworld_counterfactual, ships: "{row.both}"}]
    ships: "{row.em(1)} / {row.em(5)}"
    -->

A table of runs that are lost is compared cell by cell with the stored copy of an earlier version of the page:

    <!-- figures: copied: pixels/storm-catch -->

What a command measures again, but not from stored results, has a mark that names it, behind a paragraph, list item or
table, or behind a heading for all of its section:

    <!-- measured: python -m lab.benchmarks.drafts --suite scienceworld-500 -->

Numbers in code, links and comments are no figures, nor are those that name something (`NAMES`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Any

import yaml

from lab.figures.sources import MissingError
from lab.figures.studies import Copy, Percent
from loopwm.records.errors import InputError

NUMBER = re.compile(r"(?:(?<=[\s(|])[+-])?(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d)")
NAMES = re.compile(
    r"\b(?:T = \d+|Python \d[\d.]*|vLLM \d[\d.]*|Apache-2\.0)|\(?95 %\)?|\bseeds? \d+(?: (?:to|and) \d+)?(?!\.?\d)"
)
_HIDDEN = re.compile(r"```.*?```|<!--.*?-->|^---\n.*?\n---\n|(?:(?<=\n\n)|(?<=\A))(?: {4}[^\n]*\n)+|`[^`\n]+`", re.S)
_CODE = re.compile(r"```.*?```|<!--.*?-->|(?:(?<=\n\n)|(?<=\A))(?: {4}[^\n]*\n)+|`(?:[^`\n]|\n(?!\s*\n))+`", re.S)
_TARGET = re.compile(r"(?<=\])\([^)\s]+\)")
_MARK = re.compile(r"<!-- figures:(.*?)-->", re.S)
_MEASURED = re.compile(r"<!-- measured:(.*?)-->", re.S)
_COPIED = re.compile(r"\s*copied:\s*(\S+)\s*")
_HEADING = re.compile(r"^#+ ", re.M)
_BLOCK_START = re.compile(r"^\s*(?:- |\d+\. |#|<!--)")
_COMMAND = re.compile(r"(?:python -m|python3? |make |bash |git show|loopwm )")
_HOLE = re.compile(r"\{([^{}]+?)(?::([.,\d]*[df]))?\}")
_GAP = re.compile(r"\n\s*?\n|\n(?=- )")


@dataclass(frozen=True)
class Figure:
    """Shown text of a page at [start, end), and what it was recomputed to.

    state: `same`, `copied` (the same as in a stored copy of a table), `differs`, `not stored` (the source is missing),
    `command` (only a command stands beside it) or `neither`
    numbers: of the shown text
    """

    page: str
    label: str
    start: int
    end: int
    shown: str
    again: str
    state: str
    numbers: int = 1


class Page:
    """A page of Markdown and its figures."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        hidden = _HIDDEN.sub(_blank, text)
        self._blocks = [0, *(gap.end() for gap in _GAP.finditer(text))]
        self.visible = NAMES.sub(_blank, _TARGET.sub(_blank, hidden))
        self._commands = [code.start() for code in _CODE.finditer(text) if _COMMAND.search(code[0])]
        self._measured = [self._measured_by(mark) for mark in _MEASURED.finditer(text)]

    def figures(self, names: Mapping[str, Any]) -> list[Figure]:
        """Return all figures of the page in order. Raises InputError for a mark that cannot be read."""
        marked = [figure for mark in _MARK.finditer(self.text) for figure in self._marked(mark, names)]
        covered = [(figure.start, figure.end) for figure in marked]
        for number in NUMBER.finditer(self.visible):
            if not any(start <= number.start() < end for start, end in covered):
                state = "command" if self._has_command(number.start()) else "neither"
                marked.append(self._figure(number.start(), number.end(), "", state))
        return sorted(marked, key=lambda figure: figure.start)

    def _figure(self, start: int, end: int, again: str, state: str) -> Figure:
        line = self.text.count("\n", 0, start) + 1
        shown = self.text[start:end]
        return Figure(self.name, f"line {line}", start, end, shown, again, state, len(NUMBER.findall(shown)) or 1)

    def _has_command(self, at: int) -> bool:
        """Return True if code has a command in the block of a place, below it or above its table, or a mark does."""
        if any(start <= at < end for start, end in self._measured):
            return True
        block = bisect_right(self._blocks, at) - 1
        spans = list(pairwise([*self._blocks, len(self.text)]))
        near = spans[block : block + 1]
        near += [(a, b) for a, b in spans[block + 1 : block + 2] if self.text.startswith("    ", a)]
        near += spans[block - 1 : block] if self.text.startswith("|", spans[block][0]) else []
        return any(a <= command < b for a, b in near for command in self._commands)

    def _measured_by(self, mark: re.Match[str]) -> tuple[int, int]:
        """Return the span that a mark of a command is about. Raises InputError if it names no command."""
        if not _COMMAND.match(mark[1].strip()):
            line = self.text.count("\n", 0, mark.start()) + 1
            raise InputError(f"{self.name}: line {line}: measured: must begin with a command, got {mark[1].strip()}")
        start, end = self._block_before(mark.start())
        if not self.text.startswith("#", start):
            return start, end
        following = _HEADING.search(self.text, mark.end())
        return start, following.start() if following else len(self.text)

    def _marked(self, mark: re.Match[str], names: Mapping[str, Any]) -> Iterator[Figure]:
        where = f"{self.name}: line {self.text.count(chr(10), 0, mark.start()) + 1}"
        start, end = self._block_before(mark.start())
        if copy := _COPIED.fullmatch(mark[1]):
            yield from self._copied(start, end, _value(f"copied({copy[1]!r})", names, where), where)
            return
        if not mark[1].lstrip().startswith("rows:"):
            yield from self._prose(start, end, mark[1], names, where)
            return
        try:
            content = yaml.safe_load(mark[1])
        except yaml.YAMLError as error:
            raise InputError(f"{where}: must be YAML ({' '.join(str(error).split())})") from error
        yield from self._table(start, end, content, names, where)

    def _block_before(self, at: int) -> tuple[int, int]:
        """Return the span of the table, list item or paragraph that ends before a mark."""
        end = len(self.text[:at].rstrip())
        start = self.text.rfind("\n", 0, end) + 1
        while not _BLOCK_START.match(self.text[start:]):
            above = self.text.rfind("\n", 0, start - 1) + 1
            if start == 0 or not self.text[above : start - 1].strip():
                break
            start = above
        return start, end

    def _prose(self, start: int, end: int, content: str, names: Mapping[str, Any], where: str) -> Iterator[Figure]:
        numbers = list(NUMBER.finditer(self.visible, start, end))
        expressions = [part.strip() for part in content.split(";") if part.strip()]
        rest = expressions[-1:] == ["..."]
        expressions = expressions[:-1] if rest else expressions
        if len(expressions) > len(numbers) or (len(expressions) < len(numbers) and not rest):
            shown = ", ".join(number[0] for number in numbers)
            raise InputError(f"{where}: must have an expression for each of {shown}; got {len(expressions)}")
        for number, expression in zip(numbers, expressions, strict=False):
            if expression != "_":
                yield self._compared(number.start(), number.end(), "{" + expression + "}", names, where)

    def _copied(self, start: int, end: int, copy: Copy, where: str) -> Iterator[Figure]:
        lines = list(re.finditer(r"^\|.*$", self.text[start:end], re.M))
        if len(lines) != len(copy.rows) + 2:
            raise InputError(f"{where}: must be behind a table of {len(copy.rows)} rows, got {len(lines) - 2}")
        for line, cells in zip((lines[0], *lines[2:]), (copy.columns, *copy.rows), strict=True):
            for (shown, left, right), stored in zip(_cells(line[0]), cells, strict=True):
                if NUMBER.search(self.visible, at := start + line.start() + left, start + line.start() + right):
                    state = "copied" if shown == stored else "differs"
                    yield self._figure(at, at + len(shown), stored, state)

    def _table(
        self, start: int, end: int, content: Mapping[str, Any], names: Mapping[str, Any], where: str
    ) -> Iterator[Figure]:
        lines = list(re.finditer(r"^\|.*$", self.text[start:end], re.M))
        header = _cells(lines[0][0]) if lines else []
        rows, columns = content.get("rows", []), {k: v for k, v in content.items() if k != "rows"}
        if unknown := columns.keys() - {name for name, *_ in header}:
            raise InputError(f"{where}: columns: must be of the table, got {', '.join(sorted(unknown))}")
        if len(rows) != len(lines) - 2:
            raise InputError(f"{where}: rows: must name all {len(lines) - 2} rows of the table, got {len(rows)}")
        for line, row in zip(lines[2:], rows, strict=True):
            if row is None:
                continue
            own = {**columns, **row} if isinstance(row, dict) else {**columns, "row": row}
            scope = {**names, "row": _value_or_missing(str(own["row"]), names, where)}
            for (name, *_), (_, left, right) in zip(header, _cells(line[0]), strict=True):
                at = start + line.start()
                if name in own and name != "row" and self.text[at + left : at + right] and own[name] is not None:
                    yield self._compared(at + left, at + right, own[name], scope, where)

    def _compared(self, start: int, end: int, template: str, names: Mapping[str, Any], where: str) -> Figure:
        shown = self.text[start:end]
        try:
            again = _HOLE.sub(lambda hole: _format(_value(hole[1], names, where), hole[2], shown), template)
        except MissingError as error:
            return self._figure(start, end, str(error), "not stored")
        alike = "copied" if "copied" in template else "same"
        return self._figure(start, end, again, alike if again == shown else "differs")


def _blank(match: re.Match[str]) -> str:
    """Replace by blanks, so that places stay."""
    return re.sub(r"[^\n]", " ", match[0])


def _cells(line: str) -> list[tuple[str, int, int]]:
    """Return text, start and end of the cells of a table's line."""
    cells = []
    at = line.index("|") + 1
    for part in line[at:].rstrip().removesuffix("|").split("|"):
        left = at + len(part) - len(part.lstrip())
        text = part.strip()
        cells.append((text, left, left + len(text)))
        at += len(part) + 1
    return cells


def _value(expression: str, names: Mapping[str, Any], where: str) -> Any:
    """Evaluate an expression of a mark. Raises InputError naming it."""
    try:
        return eval(expression, {"__builtins__": {}, **names})
    except MissingError:
        raise
    except Exception as error:
        raise InputError(f"{where}: {expression}: {type(error).__name__}: {error}") from error


class _Missing:
    """Row whose source is missing: any use raises the error."""

    def __init__(self, error: MissingError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error

    def __str__(self) -> str:
        raise self._error

    def __format__(self, spec: str) -> str:
        raise self._error


def _value_or_missing(expression: str, names: Mapping[str, Any], where: str) -> Any:
    try:
        return _value(expression, names, where)
    except MissingError as error:
        return _Missing(error)


def _format(value: Any, spec: str | None, shown: str) -> str:
    """Format a value by its own format, else with the decimals and sign of a single shown number."""
    if value is None:
        return "-"
    if spec:
        return format(value, spec)
    if "e" in shown and isinstance(value, float):
        return shown if float(shown) == value else f"{value:g}"
    if NUMBER.fullmatch(" " + shown, 1) and not isinstance(value, str):
        decimals = len(shown.partition(".")[2])
        value = floor(round(value, 6) + 0.5) if decimals == 0 else value  # 32.5 is 33, not the even 32
        comma = "," if "," in shown or "." in shown or abs(value) >= 10_000 else ""
        return format(value, f"{'+' if shown[0] == '+' else ''}{comma}.{decimals}f")
    if isinstance(value, Percent):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
