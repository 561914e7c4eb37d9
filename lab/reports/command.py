"""Render runs as one page: report.html (self-contained) and report.md with its plots (SVG).

Runs are grouped by suite and scored from their predictions; an unfinished run is shown with its finished windows.
Differences are paired against the run of --against; in other suites against the same model there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic

EXAMPLE = "python -m lab report runs/eval/small-snapshot runs/eval/copy-snapshot --out runs/report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, finished or not")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="compare the others with this one (default: the first)"
    )
    parser.add_argument("--suites", type=Path, nargs="+", default=[], metavar="FILE", help="window files not committed")
    parser.add_argument("--seen", type=Path, nargs="+", default=[], metavar="FILE", help="tables of build-seen")


def run(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out: must be a folder, got {args.out}")
    files = dict(render(args.runs, args.against or args.runs[0], args.suites, args.seen))
    for name, content in files.items():
        write_atomic(args.out / name, content)
    print(f"{args.out / 'report.html'}: {len(args.runs)} runs")


def render(folders: list[Path], against: Path, suites: list[Path], tables: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (file name, content) of a report.

    Raises:
        InputError: a run, suite or table does not fit
    """
    # Import lazily: jinja2 and matplotlib take seconds, and other commands do not need them.
    from lab.reports.blocks import Plots
    from lab.reports.groups import load_runs, make_groups
    from lab.reports.html import render_html
    from lab.reports.markdown import render_markdown
    from lab.reports.runs import SuiteStore
    from lab.reports.sections import make_page
    from loopwm.records.provenance import provenance

    places = [folder.resolve() for folder in folders]
    if against.resolve() not in places:
        raise InputError(f"--against: must be one of the runs, got {against}")
    runs = load_runs(folders, SuiteStore(suites, tables))
    groups = make_groups(runs, runs[places.index(against.resolve())])
    page = make_page(groups, "Made by: " + provenance("lab")["command"])
    yield "report.html", render_html(page)
    yield "report.md", render_markdown(page)
    blocks = [block for section in page.sections for block in section.blocks if isinstance(block, Plots)]
    yield from ((f"{plot.name}.svg", plot.svg) for block in blocks for plot in block.plots)
