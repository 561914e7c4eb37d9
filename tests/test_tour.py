"""Every file, folder and name that the tour and the recipes point to is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs/tour.md"
PAGES = (TOUR, ROOT / "CONTRIBUTING.md")
PACKAGES = ("loopwm", "data_prep", "eval", "serve", "lab")

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = r"\.?[\w-][\w.-]*(?:/[\w.-]*)*"
POINTER = re.compile(rf"(?P<path>{PATH})(?::(?P<name>[A-Za-z_][\w.]*))?")
FILE = re.compile(r".+\.(?:py|md|cff|toml|txt|sh)")


def pointers(page: str) -> Iterator[tuple[str, str | None]]:
    """Paths, with names behind a colon, among the code spans of a page. What has a slash, or ends as a file does, is a
    path; a URL's path begins with a slash and is none."""
    for span in CODE.findall(re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        found = POINTER.fullmatch(span)
        if found and ("/" in found["path"] or FILE.fullmatch(found["path"])):
            yield found["path"], found["name"]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or class defines: functions, classes, and what is assigned or annotated."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((name.id, node) for name in ast.walk(target) if isinstance(name, ast.Name))


def defines(path: Path, name: str) -> bool:
    """Whether a file defines `function`, `CONSTANT`, `Class`, or `Class.member`."""
    first, _, member = name.partition(".")
    nodes = [node for bound_name, node in bound(tree(path).body) if bound_name == first]
    if not member:
        return bool(nodes)
    return any(member in dict(bound(node.body)) for node in nodes if isinstance(node, ast.ClassDef))


def faults(page: str) -> list[str]:
    """Pointers that lead nowhere."""
    found = []
    for path, name in pointers(page):
        target = ROOT / path
        if not target.exists():
            found.append(path)
        elif name is not None and (target.suffix != ".py" or not defines(target, name)):
            found.append(f"{path}:{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_pointer_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert len(list(pointers(text))) > 30
    assert faults(text) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "serve/http/apps.py",
        "server/http/app.py",
        "loopwm/cores/",
        "CONTRIBUTE.md",
        "serve/http/app.py:create_apps",
        "serve/engine/engine.py:Engine.submits",
        "serve/engine/engine.py:submit",
        "eval/scores/metrics.py:Engine.submit",
        "docs/tour.md:tour",
    ],
)
def test_a_made_up_pointer_is_found(wrong):
    right = "`serve/http/app.py:create_app`, `serve/engine/engine.py:Engine.submit` in `serve/`, not `/v1/worlds`"
    assert faults(right) == []
    assert faults(f"{right}, then `{wrong}`") == [wrong]


def test_the_tour_names_every_package():
    named = {path.rstrip("/") for path, _ in pointers(TOUR.read_text(encoding="utf-8"))}
    packages = {str(init.parent.relative_to(ROOT)) for name in PACKAGES for init in (ROOT / name).rglob("__init__.py")}
    assert packages - named == set()
