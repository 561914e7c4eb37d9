"""The notebook of the examples prints what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/tour.ipynb"
TRUST = re.compile(r"\[trust (\d\.\d\d)\]")


def test_notebook_cells_print_their_stored_output(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            printed, shown = capsys.readouterr().out, "".join("".join(out["text"]) for out in cell["outputs"])
            assert TRUST.sub("", printed) == TRUST.sub("", shown)
            trust = [float(text) for text in TRUST.findall(shown)]
            # Another processor may round the last digit otherwise.
            assert [float(text) for text in TRUST.findall(printed)] == pytest.approx(trust, abs=0.02)
    assert [world.steps for world in names["worlds"]._now] == [3]
