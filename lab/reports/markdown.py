"""Render a page as Markdown; its plots are files beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import singledispatch

from eval.scores.tables import table
from lab.reports.blocks import Block, Fold, Misses, Page, Plots, Section, Span, Table, Text

_MARKS = {"same": "{}", "missing": "[-{}-]", "added": "{{+{}+}}"}
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def render_markdown(page: Page) -> str:
    parts = [f"# {page.title}\n\n{page.lead}\n", *map(_section, page.sections), f"---\n\n{escape(page.made_by)}\n"]
    return "\n".join(parts)


def escape(text: str) -> str:
    """Escape text for Markdown and join it to one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _section(section: Section) -> str:
    title = f"{'#' * section.level} {escape(section.title)}\n"
    return "\n".join([title, *map(_block, section.blocks)])


@singledispatch
def _block(block: Block) -> str:
    raise NotImplementedError(type(block))


@_block.register
def _(block: Text) -> str:
    return f"{escape(block.paragraph)}\n"


@_block.register
def _(block: Table) -> str:
    rows = [[_cell(cell) for cell in row] for row in block.rows]
    caption = f"{escape(block.caption)}\n\n" if block.caption else ""
    return caption + table([_cell(cell) for cell in block.header], rows)


def _cell(cell: str) -> str:
    return "<br>".join(escape(line) for line in cell.split("\n"))


@_block.register
def _(block: Plots) -> str:
    return "".join(f"![{escape(plot.title)}]({plot.name}.svg)\n" for plot in block.plots)


@_block.register
def _(block: Fold) -> str:
    body = "\n".join(map(_block, block.blocks))
    return f"<details><summary>{html.escape(block.title, quote=False)}</summary>\n\n{body}\n</details>\n"


@_block.register
def _(block: Misses) -> str:
    legend = "`[-missing from the prediction-]`, `{+added by it+}`\n\n"
    return legend + "\n".join(
        f"{escape(miss.title)}; {escape(miss.scores)}; after {escape(miss.action)}:\n\n{_code(_spans(miss.spans))}"
        for miss in block.misses
    )


def _spans(spans: Sequence[Span]) -> str:
    return "".join(_MARKS[span.kind].format(span.text) for span in spans)


def _code(text: str) -> str:
    """Render a code block whose fence is longer than any in the text."""
    return "".join(f"    {line}\n" for line in text.splitlines() or [""])
