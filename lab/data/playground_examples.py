"""Write examples.json: the shortest window of some families of a suite, with the recorded observations.

example: python -m lab.data.playground_examples eval/suites/{scienceworld,alfworld}-500.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve.play import EXAMPLES

Json = dict[str, Any]

FAMILIES = ("Melt", "Freeze", "Thermometer", "Lifespan", "Find", "Genetics", "cool", "look")


def example(window: Json) -> Json:
    """Return the fields of a world in the context `observed`, and the recorded actions and observations."""
    first, *later = window["history"]
    return {
        "name": window["id"].partition("/")[2],
        "env": window["env"],
        "goal": window["goal"],
        "observation": first["observation"],
        "history": [{"action": step["action"], "observation": step["observation"]} for step in later],
        "actions": window["actions"],
        "observations": window["observations"],
    }


def make(windows: Iterable[Json]) -> list[Json]:
    """Return one example per family, in the order of FAMILIES; ties go to the first window."""
    shortest: dict[str, Json] = {}
    for window in windows:
        candidate, best = example(window), shortest.get(window["family"])
        if best is None or len(json.dumps(candidate)) < len(json.dumps(best)):
            shortest[window["family"]] = candidate
    return [shortest[family] for family in FAMILIES if family in shortest]


def read(path: Path) -> list[Json]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.data.playground_examples", description=__doc__)
    parser.add_argument("suites", nargs="+", type=Path, help="suite files, .jsonl.gz")
    parser.add_argument("--out", type=Path, default=EXAMPLES)
    args = parser.parse_args(arguments)
    try:
        examples = make(window for path in args.suites for window in read(path))
    except (OSError, EOFError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.write_text(json.dumps(examples, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
