"""Faults are planted where the list says, and found or not as the tests say."""

from __future__ import annotations

import ast
import random
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.mutants import command
from lab.mutants.command import ROOT, Fault, random_faults, read_faults, run_faults
from loopwm.records.errors import InputError


def test_every_fault_has_one_place() -> None:
    for fault in read_faults():
        text = (ROOT / fault.file).read_text()
        assert text.count(fault.find) == 1, fault
        compile(text.replace(fault.find, fault.replace), fault.file, "exec")  # any test would find a syntax error


def test_every_named_test_of_a_fault_exists() -> None:
    for fault in read_faults():
        for test in shlex.split(fault.tests):
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), fault
            assert not name or name.partition("[")[0] in functions(ROOT / path), fault


@cache
def functions(path: Path) -> set[str]:
    """Return the names of a file's functions."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a function of two lines, one of which its test checks."""
    (tmp_path / "code.py").write_text("def f(x):\n    y = x + 1\n    return y if x >= 0 else 0\n")
    (tmp_path / "test_code.py").write_text("from code import f\n\ndef test_f():\n    assert f(3) == 4\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    return tmp_path


def test_faults_are_found_or_survive_by_tests(project: Path) -> None:
    fault = Fault("f", "code.py", "x + 1", "x - 1", "test_code.py")
    survivor = Fault("f", "code.py", "x >= 0", "x > 0", "test_code.py")
    before = (project / "code.py").read_text()
    assert run_faults([fault, survivor], 60) == [survivor]
    assert (project / "code.py").read_text() == before


def test_fault_that_every_test_must_find_survives_one(project: Path) -> None:
    with (project / "test_code.py").open("a") as file:
        file.write("\ndef test_sign():\n    assert f(-2) == 0\n")
    both = Fault("f", "code.py", "x + 1", "x - 1", "test_code.py", every=True)
    one = Fault("f", "code.py", "x + 1", "x - 1", "test_code.py::test_f", every=True)
    assert run_faults([both, one], 60) == [both]


def test_failing_tests_without_fault_are_refused(project: Path) -> None:
    (project / "test_code.py").write_text("def test_f():\n    assert False\n")
    with pytest.raises(InputError, match=r"must pass without a fault, got test_code\.py"):
        run_faults([Fault("f", "code.py", "x + 1", "x - 1", "test_code.py")], 60)


def test_tests_that_do_not_run_are_refused(project: Path) -> None:
    with command.Tests(project) as tests:
        for named in ("test_code.py::test_g", "test_none.py", "code.py"):
            with pytest.raises(InputError, match=rf"tests: must run, got exit status \d of pytest for {named}"):
                tests.first_failure(named, 60)


def test_patience_below_a_second_ends_tests(project: Path) -> None:
    (project / "test_code.py").write_text("import time\n\ndef test_f():\n    time.sleep(30)\n")
    with command.Tests(project) as tests:
        assert tests.first_failure("test_code.py", 0.2) == "no end within 0.2 s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "2"], "--random 2: must have --files"),
        (["--patience", "0"], "--patience: must be a number above 0, got 0"),
        (["--patience", "nan"], "--patience: must be a number above 0, got nan"),
    ],
)
def test_bad_options_are_one_line_errors(arguments: list[str], message: str, capsys) -> None:
    assert main(["mutants", "--area", "core", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_random_faults_change_one_operator(project: Path) -> None:
    faults = random_faults(random.Random(0), ["code.py"], "test_code.py")
    changes = {(fault.find, fault.replace) for fault, _ in zip(faults, range(20), strict=False)}
    assert changes == {
        ("    y = x + 1", "    y = x - 1"),
        ("    return y if x >= 0 else 0", "    return y if x > 0 else 0"),
    }
