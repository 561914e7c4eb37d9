"""Command lines of earlier releases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from data_prep.main import main as data_prep
from eval.main import main as evaluate


@pytest.mark.parametrize(
    ("main", "name", "replacement"),
    [(data_prep, "hidden", "lab refresh-hidden"), (evaluate, "ledger", "lab results")],
)
def test_main_renamed_command_names_the_new_one(
    main: Callable[[list[str]], int], name: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--out", "somewhere"])
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {name}: renamed, run `python -m {replacement}`\n")
