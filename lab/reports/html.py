"""A page as one HTML file that needs no other."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.reports.plots import INK
from lab.reports.blocks import Block, Page

TEMPLATE = Path(__file__).parent / "page.html.j2"


def render_html(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    # In the page's own text colour. A plot's text was escaped when it was drawn.
    environment.filters["svg"] = lambda plot: Markup(plot.svg.replace(INK, "currentColor"))
    environment.tests["block"] = lambda block, kind: _kind(block) == kind
    return environment.get_template(TEMPLATE.name).render(page=page)


def _kind(block: Block) -> str:
    return type(block).__name__
