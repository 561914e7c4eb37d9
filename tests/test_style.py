"""Docstrings begin with what code does, and variables are nouns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("loopwm", "data_prep", "eval", "serve", "lab", "examples")
QUESTIONS = ("what", "which", "who", "whose", "how", "whether", "when", "where")
PARTICIPLES = {"told", "found", "asked", "made", "begun", "kept", "drawn"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def question_docstrings(tree: ast.Module) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and text.split()[0].lower() in QUESTIONS:
            yield text.splitlines()[0]


def participle_names(tree: ast.Module) -> Iterator[str]:
    """Yield variables and parameters; fields of classes may be keys of stored results."""
    fields = {node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in PARTICIPLES:
            yield f"{name}, line {getattr(node, 'lineno', 0)}"


def test_docstrings_do_not_begin_with_a_question_word():
    assert [f"{path}: {line}" for path, tree in trees() for line in question_docstrings(tree)] == []


def test_variables_are_not_participles():
    assert [f"{path}: {name}" for path, tree in trees() for name in participle_names(tree)] == []


def test_checks_of_style_find_planted_faults():
    tree = ast.parse('"""Which it is."""\ndef f(asked):\n    """Return x."""\n    found = asked\n')
    assert list(question_docstrings(tree)) == ["Which it is."]
    assert list(participle_names(tree)) == ["asked, line 2", "found, line 4"]
