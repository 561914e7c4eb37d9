"""Recompute the figures of README and the results pages from what is stored beside them.

Prints one line for each difference (page, figure, shown, recomputed) and fails on any. It also fails on a figure whose
run is not stored, and on one without a command: `lab/figures/marks.py` describes the marks of pages. --keep stores the
predictions and results of finished runs, and the dev rows of training runs; --write brings the pages up to date. --list
shows the figures that only name their command: what a machine measures, and runs of hours that are not stored.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.solutions import PACKED
from data_prep.tokenize import TOKENIZER_FILE
from lab.data.stats import COLUMNS, count_groups, token_counter
from lab.data.unpack import EPISODES, SUFFIX, members
from lab.figures.marks import NUMBER, Figure, Page
from lab.figures.predictions import FOLDER, Rescored, keep
from lab.figures.predictions import SUFFIX as PREDICTIONS
from lab.figures.sources import names_in
from lab.reports import pictures_page, results_page
from lab.reports.picture_store import read_pictures
from lab.reports.results_page import in_short, read_store
from loopwm.records.episodes import Episode, parse_episode
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, write_atomic, write_json

EXAMPLE = "python -m lab figures --keep runs/eval/small-observed --write"

ROOT = Path(__file__).parents[2]
README, CARD, RESULTS, STATISTICS = (
    "README.md",
    "loopwm/pretrained/README.md",
    "docs/results",
    "docs/statistics/statistics.md",
)
CLAIMS_PAGE = f"{RESULTS}/{pictures_page.PAGE}"
PAGES = (README, CARD, "docs/results.md", f"{RESULTS}/studies.md", f"{RESULTS}/pixels.md")
"""Pages that are typed."""
FAULTS = {"differs": "recomputed ", "not stored": "", "neither": "neither recomputed nor with a command"}
"""States of figures that are errors, and how they are reported."""
PARTS = ("runs", "pages", "packs")
ORDERED = ("repeated episodes", "repeated transitions")
"""Columns of the statistics that depend on the order in which episodes were read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="RUN", help="finished runs to store")
    parser.add_argument("--write", action="store_true", help="write the recomputed figures into the pages")
    parser.add_argument("--list", action="store_true", help="show the figures that only name a command")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to recompute (default: all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout whose pages and results are compared")


def run(args: argparse.Namespace) -> None:
    """Recompute the figures. Raises InputError if one differs."""
    data = args.root / RESULTS / "data"
    for folder in args.keep:
        print(f"kept {keep_run(folder, data)}")
    if args.write:
        write_pages(args.root)
    parts = {"runs": runs_again, "pages": pages_again, "packs": packs_again}
    figures: list[Figure] = []
    for part in args.parts:
        started = time.monotonic()
        of_part = list(parts[part](args.root))
        if not of_part:
            raise InputError(f"{args.root}: must have figures of {part}, found none")
        figures += of_part
        print(f"{part}: {time.monotonic() - started:.0f} s")
    report(figures, args.list)


def report(figures: Sequence[Figure], listed: bool) -> None:
    """Print differences and counts. Raises InputError if a figure differs, or has neither a source nor a command."""
    for figure in figures:
        if figure.state in FAULTS:
            print(f"{figure.page}: {figure.label}: shown {figure.shown}, {FAULTS[figure.state]}{figure.again}")
        elif figure.state == "command" and listed:
            print(f"{figure.page}: {figure.label}: {figure.shown}: a command only")
    pages: dict[str, Counter[str]] = {}
    for figure in figures:
        pages.setdefault(figure.page, Counter())[figure.state] += figure.numbers
    for page, counts in pages.items():
        print(f"{page}: {_counted(counts)}")
    print(f"all: {_counted(sum(pages.values(), Counter()))}")
    faults = Counter(figure.state for figure in figures if figure.state in FAULTS)
    if faults:
        raise InputError(f"figures: {', '.join(f'{faults[state]} {state}' for state in FAULTS if faults[state])}")


def _counted(counts: Counter[str]) -> str:
    checked, total = counts["same"] + counts["copied"] + counts["differs"], sum(counts.values())
    return (
        f"{checked} of {total} figures recomputed ({checked / max(total, 1):.0%}), {counts['copied']} of them only "
        f"compared with a stored copy; {counts['differs']} differ; {counts['not stored']} of runs that are not stored, "
        f"{counts['command']} with a command only, {counts['neither']} with neither"
    )


def keep_run(folder: Path, data: Path) -> str:
    """Store a finished run on a suite, or the dev rows of a training run. Returns the stored name."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return keep(folder, data)
    rows = [row for _, row in read_json_lines(metrics) if row["kind"] == "dev"]
    brief = [{name: value for name, value in row.items() if "/" not in name} for row in rows]
    write_json(data / "training" / f"{folder.name}.json", results_page.rounded(brief))
    return f"training/{folder.name}"


def runs_again(root: Path) -> Iterator[Figure]:
    """Yield every figure of the stored results of suites."""
    data = root / RESULTS / "data"
    for stored in sorted(data.glob("*--*--*.json")):
        page, path = str(stored.relative_to(root)), data / FOLDER / f"{stored.stem}{PREDICTIONS}"
        if not path.is_file():
            yield Figure(page, "predictions", 0, 0, "results", f"{path.relative_to(data)} is missing", "not stored")
            continue
        shown, again = _leaves(read_json(stored)), _leaves(Rescored.read(path).stored())
        for name in dict.fromkeys((*shown, *again)):
            old, new = shown.get(name), again.get(name)
            yield Figure(page, name, 0, 0, str(old), str(new), "same" if old == new else "differs")


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested JSON by path, without provenance; rows by family and horizon."""
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if key != "provenance"]
    elif isinstance(value, list):
        items = [(_row_name(item, i), item) for i, item in enumerate(value)]
    else:
        return {name: value}
    return {path: leaf for key, item in items for path, leaf in _leaves(item, f"{name} {key}".strip()).items()}


def _row_name(item: Any, index: int) -> str:
    return f"{item['family']} {item['horizon']}" if isinstance(item, dict) else str(index)


def generated(root: Path) -> dict[str, str]:
    """Return the content of every generated page and picture by its path."""
    data = root / RESULTS / "data"
    pages = {"README.md": results_page.render(read_store(data)), **dict(pictures_page.render(read_pictures(data)))}
    return {f"{RESULTS}/{name}": content for name, content in pages.items()}


def pages_again(root: Path) -> Iterator[Figure]:
    """Yield the figures of generated pages and of those that are typed."""
    for name, content in generated(root).items():
        shown = (root / name).read_text(encoding="utf-8")
        if name.endswith(".svg"):
            state = "same" if shown == content else "differs"
            yield Figure(name, "picture", 0, 0, "this picture", "another one", state)
        else:
            typed = content.partition(pictures_page.CLAIMS)[2].splitlines() if name == CLAIMS_PAGE else []
            yield from _lines_again(name, shown, content, copied={line for line in typed if line.startswith("|")})
    names = names_in(root)
    table = in_short(read_store(root / RESULTS / "data"))
    for name in PAGES:
        yield from typed_figures(name, (root / name).read_text(encoding="utf-8"), table, names)


def typed_figures(name: str, text: str, table: str, names: dict[str, Any]) -> list[Figure]:
    """Return the figures of a typed page. table: the short table of the shipped checkpoint, where the page has it."""
    figures = Page(name, text).figures(names)
    span = _short_table(text, table)
    if span is None:
        return figures
    outside = [figure for figure in figures if not span[0] <= figure.start < span[1]]
    return [*outside, *_lines_again(name, text[slice(*span)], table, text.count("\n", 0, span[0]))]


def _short_table(text: str, table: str) -> tuple[int, int] | None:
    """Return the span of the table with the header of `table`, None without one."""
    header = re.escape(table.partition("\n")[0])
    match = re.search(rf"^{header}\n(?:\|.*\n)*", text, re.M)
    return match and match.span()


def _lines_again(page: str, shown: str, again: str, above: int = 0, copied: Collection[str] = ()) -> Iterator[Figure]:
    """Compare a generated text line by line. above: lines of the page before it. copied: lines of typed figures."""
    old, new = shown.splitlines(), again.splitlines()
    for i in range(max(len(old), len(new))):
        a, b = (lines[i] if i < len(lines) else "(no line)" for lines in (old, new))
        numbers = len(NUMBER.findall(a))
        if a == b and numbers:
            yield Figure(page, f"line {above + i + 1}", 0, 0, a, b, "copied" if a in copied else "same", numbers)
        elif a != b:
            yield Figure(page, f"line {above + i + 1}", 0, 0, a, b, "differs", max(numbers, 1))


def write_pages(root: Path) -> None:
    """Write generated pages and the recomputed figures of typed ones."""
    for name, content in generated(root).items():
        write_atomic(root / name, content)
    names, table = names_in(root), in_short(read_store(root / RESULTS / "data"))
    for name in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        for figure in reversed(Page(name, text).figures(names)):
            if figure.state == "differs":
                text = text[: figure.start] + figure.again + text[figure.end :]
        if span := _short_table(text, table):
            text = text[: span[0]] + table + text[span[1] :]
        write_atomic(root / name, text)


def packed_episodes() -> Iterator[Episode]:
    """Yield the episodes of all packs; a file that several packs have counts once."""
    known: set[str] = set()
    for path in sorted(PACKED.glob(f"*{SUFFIX}")):
        for name, content in members(path):
            if name.endswith(EPISODES) and name not in known:
                known.add(name)
                yield from map(parse_episode, content.decode().splitlines())


def packs_again(root: Path) -> Iterator[Figure]:
    """Yield the figures of the page of statistics, counted in the packs."""
    tables = count_groups(packed_episodes(), token_counter(TOKENIZER_FILE))
    rows = {name: group.row() for title in ("environment", "split and policy") for name, group in tables[title].items()}
    page = (root / STATISTICS).read_text(encoding="utf-8")
    shown = {cells[0]: cells[1:] for line in page.splitlines() if len(cells := _cells(line)) == len(COLUMNS) + 1}
    shown = {name: cells for name, cells in shown.items() if name in rows or cells[0][:1].isdigit()}
    for name in dict.fromkeys((*shown, *rows)):
        for column, old, new in zip(
            COLUMNS, shown.get(name, ["-"] * len(COLUMNS)), rows.get(name, ["-"] * len(COLUMNS)), strict=True
        ):
            state = "command" if column in ORDERED else "same" if old == new else "differs"
            yield Figure(STATISTICS, f"{name}, {column}", 0, 0, old, new, state)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
