"""What the documentation points to is there, and figures of the first page are those of the pages behind it."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

import loopwm

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them: lower case, hyphens for spaces, letters, digits and underscores kept."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_page_and_a_heading_of_it(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        there = page.parent / path if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_site_lists_every_page():
    """Pages of the navigation that no page of docs/ is, `docs/hooks.py` makes."""
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set()
    assert listed - pages == {"index.md", "CONTRIBUTING.md", "minimal.md", "CHANGELOG.md"}


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["title"], str(citation["version"])) == ("LoopWM", loopwm.__version__)
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
