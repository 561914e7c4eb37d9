"""What docs/equations.md says of the code is so: functions, tests and citations are where it names them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "equations.md"
CITING = ("loopwm", "eval", "data_prep", "serve")
COLUMNS = ["Paper, number", "Formula", "Code", "Test"]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

NUMBERED = ("equation", "section", "appendix", "table", "figure", "algorithm")
PLACE = r"(?:[A-Z](?:\.\d+)*|\d+(?:\.\d+)*)"
CITATION = re.compile(rf"(\w+), ((?i:{'|'.join(NUMBERED)}))s? ({PLACE}\b(?:(?:, | and | to ){PLACE}\b)*)")
"""PAPER, equation 3; PAPER, tables 7, 8 and 11; PAPER, equations 13 to 15."""

Citation = tuple[str, str, str]
"""Paper, kind and number, such as LoopWM, equation, 12."""


@dataclass(frozen=True)
class Row:
    """A line of a table: the formula's source as it is cited, and PATH:NAME of its functions and tests."""

    line: int
    source: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(page: str) -> Iterator[Row]:
    """Every line of the page's tables. Raises ValueError for a table of other columns."""
    lines = page.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        is_head = number == 1 or not lines[number - 2].startswith("|")
        if is_head != (cells(line) == COLUMNS) or len(cells(line)) != len(COLUMNS):
            raise ValueError(f"line {number}: expected the columns {COLUMNS}")
        if not is_head:
            source, _, code, tests = cells(line)
            yield Row(number, source, tuple(re.findall("`([^`]+)`", code)), tuple(re.findall("`([^`]+)`", tests)))


def citations(text: str) -> set[Citation]:
    """The numbered places of papers that a text cites, one by one."""
    found = set()
    for paper, kind, places in CITATION.findall(" ".join(text.split())):
        for part in re.split(", | and ", places):
            first, _, last = part.partition(" to ")
            numbers = range(int(first), int(last) + 1) if last.isdigit() else filter(None, (first, last))
            found |= {(paper, kind.lower(), str(number)) for number in numbers}
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(name: str) -> ast.AST | None:
    """The function, class or method that PATH:NAME points to; NAME may be CLASS.METHOD."""
    path, _, dotted = name.partition(":")
    if not dotted or not (ROOT / path).is_file():
        return None
    node: ast.AST | None = tree_of(ROOT / path)
    for part in dotted.split("."):
        inside = ast.iter_child_nodes(node) if node else ()
        node = next((child for child in inside if isinstance(child, DEFINITIONS) and child.name == part), None)
    return node


def docstrings(name: str) -> str:
    """Its own docstring and its module's."""
    node = definition(name)
    assert isinstance(node, DEFINITIONS)
    module = tree_of(ROOT / name.partition(":")[0])
    return f"{ast.get_docstring(node) or ''}\n{ast.get_docstring(module) or ''}"


def is_cited(source: str, text: str) -> bool:
    """Whether a text cites every numbered place of a row; where there is none, whether it names the paper."""
    places = citations(source)
    return places <= citations(text) if places else source in " ".join(text.split())


def faults(page: str) -> list[str]:
    """What is wrong with the rows of a page, one line each."""
    found = []
    for row in rows(page):
        place = f"line {row.line}: {row.source}"
        if not (row.source and row.code and row.tests):
            found.append(f"{place}: expected a source, code and a test")
        found += [f"{place}: {name} is not there" for name in (*row.code, *row.tests) if definition(name) is None]
        wrong = [name for name in row.tests if not re.fullmatch(r"tests/\S+\.py:test_\w+", name)]
        found += [f"{place}: {name} is no test" for name in wrong]
        silent = [name for name in row.code if definition(name) and not is_cited(row.source, docstrings(name))]
        found += [f"{place}: {name} does not cite it" for name in silent]
    return found


def cited_in_code() -> dict[Citation, str]:
    """Every numbered citation in a docstring, and a file that has it."""
    found = {}
    for path in sorted(path for package in CITING for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.Module, *DEFINITIONS)):
                found |= dict.fromkeys(citations(ast.get_docstring(node) or ""), str(path.relative_to(ROOT)))
    return found


def without_row(cited: dict[Citation, str], page: str) -> list[str]:
    """Citations of the page's papers that no row has."""
    listed = {citation for row in rows(page) for citation in citations(row.source)}
    papers = {paper for paper, _, _ in listed}
    missing = {citation: path for citation, path in cited.items() if citation[0] in papers and citation not in listed}
    return [f"{path}: {paper}, {kind} {number}" for (paper, kind, number), path in missing.items()]


def test_every_row_names_code_that_cites_it_and_a_test():
    page = PAGE.read_text(encoding="utf-8")
    assert len(list(rows(page))) > 60
    assert faults(page) == []


def test_every_numbered_citation_in_the_code_has_a_row():
    cited = cited_in_code()
    assert ("LoopWM", "equation", "12") in cited
    assert without_row(cited, PAGE.read_text(encoding="utf-8")) == []


HEAD = "| Paper, number | Formula | Code | Test |\n| --- | --- | --- | --- |\n"
GATE = "`loopwm/core/exit_rules.py:ExitGate`"
TEST = "`tests/core/test_exit_rules.py:test_rules_leave_where_their_formulas_say`"


def test_a_right_row_is_not_blamed():
    assert faults(f"{HEAD}| LoopWM, equation 12 | g | {GATE} | {TEST} |") == []
    assert faults(f"{HEAD}| LoopWM | g | {GATE} `loopwm/core/exit_rules.py:ExitGate.forward` | {TEST} |") == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (f"| LoopWM, equation 13 | g | {GATE} | {TEST} |", "ExitGate does not cite it"),
        (f"| LoopWM, equations 11 and 12 | g | {GATE} | {TEST} |", "ExitGate does not cite it"),
        (f"| Ouro, equation 12 | g | {GATE} | {TEST} |", "ExitGate does not cite it"),
        (f"| STORM | g | {GATE} | {TEST} |", "ExitGate does not cite it"),
        (f"| LoopWM | g | `loopwm/core/exit_rules.py:ExitDoor` | {TEST} |", "ExitDoor is not there"),
        (f"| LoopWM | g | `loopwm/core/exit_rules.py:ExitGate.backward` | {TEST} |", "ExitGate.backward is not there"),
        (f"| LoopWM | g | `loopwm/core/stopping.py:ExitGate` | {TEST} |", "loopwm/core/stopping.py:ExitGate is not"),
        (f"| LoopWM | g | {GATE} | `tests/core/test_exit_rules.py:test_nothing` |", "test_nothing is not there"),
        (f"| LoopWM | g | {GATE} | `tests/core/test_exit_rules.py:gated_core` |", "gated_core is no test"),
        (f"| LoopWM | g | {GATE} | |", "expected a source, code and a test"),
        (f"| LoopWM | g | | {TEST} |", "expected a source, code and a test"),
    ],
)
def test_a_wrong_row_is_found(row, fault):
    (found,) = faults(HEAD + row)
    assert fault in found


@pytest.mark.parametrize("table", ["| Paper | Code |\n| --- | --- |", HEAD + "| LoopWM | g | h | i | j |"])
def test_a_table_of_other_columns_is_refused(table):
    with pytest.raises(ValueError, match="expected the columns"):
        list(rows(table))


def test_a_citation_without_a_row_is_found():
    page = f"{HEAD}| LoopWM, equations 11 to 13 | g | {GATE} | {TEST} |"
    cited = {
        ("LoopWM", "equation", "12"): "a.py",
        ("LoopWM", "equation", "99"): "b.py",
        ("Cited", "table", "1"): "c.py",
    }
    assert without_row(cited, page) == ["b.py: LoopWM, equation 99"]


def test_citations_are_read_one_by_one():
    text = "(LoopWM, equations 13 to 15 and 20; Parcae,\n    section 4.1; TWISTED, Tables 7, 8 and 12;"
    text += " TWISTED, appendix B.3.2.)"
    equations = {("LoopWM", "equation", number) for number in ("13", "14", "15", "20")}
    tables = {("TWISTED", "table", number) for number in ("7", "8", "12")}
    others = {("Parcae", "section", "4.1"), ("TWISTED", "appendix", "B.3.2")}
    assert citations(text) == equations | tables | others
