"""Write the page of pictures and claims beside the results page, and its plots, from the stored results.

--keep copies the results of finished studies, agents, loads and other kinds of a picture into the folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.scores.tables import table
from lab.reports.claims import VERDICTS
from lab.reports.picture_store import PictureStore, keep, read_pictures
from lab.reports.pictures import pictures
from lab.reports.results_page import Result
from loopwm.records.files import write_atomic

EXAMPLE = "python -m lab pictures docs/results --keep runs/studies/depth"

DATA, PAGE = "data", "pictures.md"
LEAD = (
    "Made by `python -m lab pictures docs/results` from the stored results in [data](data/). Exact match in per cent, "
    "with 95 % intervals over games. The tables are on [the page of all results](README.md).\n"
)
CLAIMS = "## What the papers claim"
"""Heading of the table of claims, the last of the page; its texts are typed in claims.json."""

MOVED = (
    ("python -m eval study", "python -m lab study"),
    ("python -m eval plan", "python -m lab plan"),
    ("python -m eval rollout", "python -m lab rollout"),
    ("python benchmarks/serve_load.py", "python -m lab.benchmarks.serve_load"),
)
"""Commands of stored results that have another name now."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of the page; the results lie in its folder data")
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="RUN", help="finished results to store")


def run(args: argparse.Namespace) -> None:
    for folder in args.keep:
        keep(folder, args.folder / DATA)
    for name, content in render(read_pictures(args.folder / DATA)):
        write_atomic(args.folder / name, content)
    print(args.folder / PAGE)


def render(store: PictureStore) -> Iterator[tuple[str, str]]:
    """Yield (file name, content) of the page and its plots."""
    parts = [f"# Pictures and claims\n\n{LEAD}"]
    for number, (picture, svg, caption) in enumerate(pictures(store), start=1):
        parts.append(f"## {number}. {picture.title}\n\n{_shown(picture.name, svg, caption)}    {picture.command}\n")
        if svg:
            yield f"{picture.name}.svg", svg
        if commands := _commands(picture.of(store)):
            parts.append(f"Made from:\n\n{commands}")
    if store.claims:
        parts.append(f"{CLAIMS}\n\n{_claims(store.claims)}")
    yield PAGE, "\n".join(parts)


def _shown(name: str, svg: str | None, caption: str) -> str:
    if svg is None:
        return "No stored result to draw; this command makes one:\n\n"
    return f"**{caption}**\n\n![{name}]({name}.svg)\n\n"


def _commands(results: Sequence[Result]) -> str:
    """List the commands that made these results, by the names that they have now."""
    lines = []
    for result in results:
        command = result["command"]
        for old, new in MOVED:
            command = command.replace(old, new)
        lines.append(f"- `{command}`{' (figures copied from a page)' if 'transcribed' in result else ''}\n")
    return "".join(lines)


def _claims(claims: Sequence[Result]) -> str:
    """Return the table of claims, reproduced ones first."""
    ordered = sorted(claims, key=lambda claim: VERDICTS.index(claim["verdict"]))
    counts = ", ".join(f"{sum(c['verdict'] == verdict for c in claims)} {verdict}" for verdict in VERDICTS)
    rows = [[claim["claim"], claim["verdict"], claim["here"], claim["measured"]] for claim in ordered]
    how = "Verdicts on pixel worlds are computed from the bars of [data/claims.json](data/claims.json)."
    return f"{counts}. {how}\n\n" + table(["Claim", "Verdict", "Here", "Measured"], rows)
