"""Verdicts on claims follow from bars over stored tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.reports.claims import NOT_RESOLVED, VERDICTS, Table, verdict
from loopwm.records.errors import InputError

DATA = Path(__file__).parents[3] / "docs/results/data"
CLAIMS: list[dict[str, Any]] = json.loads((DATA / "claims.json").read_text())
COMPUTED = [claim for claim in CLAIMS if "bars" in claim]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "copied").mkdir()
    rows = [
        ["a", "1,200 (1,100 to 1,300)", "70-87"],
        ["b, seed 0", "-0.5", ""],
        ["b, seed 1", "2 / **3**", "(0.1-0.6)"],
    ]
    table = {"columns": ["arm", "x", "y"], "rows": rows}
    (tmp_path / "copied/t.json").write_text(json.dumps({"table": table}))
    return tmp_path


def test_cells_are_their_numbers(data: Path) -> None:
    table = Table.read(data, "t")
    assert table.cell("a", "x") == [1200]
    assert table.bounds("a", "x") == [1100, 1300]
    assert table.cell("a", "y") == [70, 87]
    assert table.cell("b, seed 0", "x") == [-0.5]
    assert table.across("b, seed 1") == [2, 3]
    assert table.bounds("b, seed 1", "y") == [0.1, 0.6]
    assert table.like("b") == ["b, seed 0", "b, seed 1"]
    with pytest.raises(InputError, match=r"t: must have the row 'c' and the column 'x'"):
        table.cell("c", "x")


@pytest.mark.parametrize(("low", "high", "expected"), [(0, 1, "reproduced"), (2, 3, NOT_RESOLVED)])
def test_verdict_is_the_bar_that_is_reached(low: int, high: int, expected: str, data: Path) -> None:
    bars = {"reproduced": f"cell('b, seed 1', 'x')[0] > {high}", "contradicted": f"cell('b, seed 1', 'x')[0] < {low}"}
    assert verdict({"claim": "c", "table": "t", "bars": bars}, data) == expected
    assert verdict({"claim": "c", "verdict": "contradicted"}, data) == "contradicted"


def test_an_unknown_typed_verdict_is_refused(data: Path) -> None:
    with pytest.raises(InputError, match=r"c: verdict: must be one of reproduced, .*, got confirmed"):
        verdict({"claim": "c", "verdict": "confirmed"}, data)


def test_bars_of_two_verdicts_are_refused(data: Path) -> None:
    with pytest.raises(InputError, match="c: bars must be of one verdict at most"):
        verdict({"claim": "c", "table": "t", "bars": {"reproduced": "1 > 0", "contradicted": "1 > 0"}}, data)


def test_claims_on_pixel_worlds_are_computed() -> None:
    pixels = [claim for claim in CLAIMS if "](pixels.md#" in claim["measured"]]
    assert pixels == COMPUTED
    assert all("verdict" not in claim for claim in COMPUTED)


@pytest.mark.parametrize("claim", COMPUTED, ids=lambda claim: claim["claim"][:40])
def test_another_verdict_needs_other_figures(claim: dict[str, Any], tmp_path: Path) -> None:
    """Scaled tables reach the other bars: none of them is a constant."""
    stored = json.loads((DATA / "copied" / f"{claim['table']}.json").read_text())
    found = {verdict(claim, DATA)}
    for cells in range(len(stored["table"]["rows"])):
        for factor in ("0", "1000", "-1000"):
            rows = [list(row) for row in stored["table"]["rows"]]
            rows[cells] = [rows[cells][0], *(f"{factor} ({factor} to {factor})" for _ in rows[cells][1:])]
            rows += 2 * [rows[cells]]  # as more seeds
            (tmp_path / "copied" / claim["table"]).parent.mkdir(parents=True, exist_ok=True)
            changed = {"table": stored["table"] | {"rows": rows}}
            (tmp_path / "copied" / f"{claim['table']}.json").write_text(json.dumps(changed))
            found.add(verdict(claim, tmp_path))
    assert len(found) > 1
    assert found <= set(VERDICTS)
