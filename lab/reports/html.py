"""Render a page as one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lab.reports.blocks import Block, Page
from lab.reports.plots import INK

TEMPLATE = Path(__file__).parent / "page.html.j2"


def render_html(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    # currentColor follows the page's theme. Markup is safe: the text in a plot is already escaped.
    environment.filters["svg"] = lambda plot: Markup(plot.svg.replace(INK, "currentColor"))
    environment.tests["block"] = lambda block, kind: _kind(block) == kind
    return environment.get_template(TEMPLATE.name).render(page=page)


def _kind(block: Block) -> str:
    return type(block).__name__
