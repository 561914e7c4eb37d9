"""What the documentation points to is there, and figures of the first page are those of the pages behind it."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results/shipped-checkpoint.md").read_text(encoding="utf-8")
CARD = (ROOT / "loopwm/pretrained/README.md").read_text(encoding="utf-8")
HORIZONS = 5


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the rows of a page's tables, without bold type."""
    for line in page.splitlines():
        if line.startswith("| "):
            yield [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def exact_match(page: str) -> set[tuple[str, ...]]:
    """Model, context and EM by horizon, of rows that have these, alone or with other metrics behind a slash."""
    shown = [row for row in rows(page) if len(row) == 2 + HORIZONS]
    found = {(*row[:2], *(cell.partition(" / ")[0] for cell in row[2:])) for row in shown}
    return {row for row in found if all(re.fullmatch(r"\d+\.\d", cell) for cell in row[2:])}


def of_the_card(page: str) -> tuple[str, ...]:
    """EM by horizon in the card of the shipped checkpoint, whose rows are horizons."""
    return tuple(row[1] for row in rows(page) if row[0].isdigit())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_readmes_figures_are_those_of_the_results():
    assert len(exact_match(README)) == 4
    assert exact_match(README) <= exact_match(RESULTS)
    assert ("loopwm-small", "snapshot", *of_the_card(CARD)) in exact_match(README)


def test_a_figure_that_no_result_has_is_found():
    (row,) = [row for row in exact_match(README) if row[1] == "snapshot"]
    forged = README.replace(f"| {row[-2]} | {row[-1]} |", f"| {row[-2]} | 99.9 |")
    assert exact_match(forged) - exact_match(RESULTS) == {(*row[:-1], "99.9")}


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["title"], str(citation["version"])) == ("LoopWM", project["version"])
    assert citation["license"] == project["license"]
    assert all(source["title"] and source["authors"] for source in citation["references"])


def test_the_picture_is_well_formed_and_loads_nothing():
    for part in ElementTree.parse(ROOT / "docs/loopwm.svg").iter():
        assert not part.tag.endswith(("script", "image", "foreignObject"))
        assert not [name for name in part.attrib if name.endswith("href") or name.startswith("on")]


def test_every_target_of_the_makefile_that_is_named_is_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    told = re.findall(r"make ([a-z-]+)  ", makefile)
    for target in {*phony.split(), *told}:
        assert re.search(rf"^{target}:", makefile, re.M), target
