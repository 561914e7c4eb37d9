"""Export episodes as a Hugging Face `datasets` folder: Parquet by split, with a data card.

datasets.load_dataset("OUT")            one row an episode, its steps as parallel lists
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from loopwm.records.episodes import Episode, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, write_lines

EXAMPLE = "python -m lab export-episodes --episodes data/episodes/train --out data/export"

STEP_FIELDS = ("action", "observation", "score", "done", "look", "inventory")
EPISODES_PER_FILE = 5_000


def to_row(episode: Episode) -> dict[str, Any]:
    """Return a flat row: `variation` as a string, each field of the steps as a list, and `hidden_states`."""
    names = ("env", "task", "split", "policy", "goal")
    steps: dict[str, Any] = {name: [getattr(step, name) for step in episode.steps] for name in STEP_FIELDS}
    steps["hidden_states"] = [episode.hidden_state_at(i) for i in range(len(episode.steps))]
    return {**{name: getattr(episode, name) for name in names}, "variation": str(episode.variation), **steps}


def data_card(sizes: Counter[str], environments: list[str], policies: list[str]) -> str:
    front = {
        "license": "apache-2.0",
        "language": ["en"],
        "task_categories": ["text-generation"],
        "tags": ["world-model", "text-game", *environments],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}-*.parquet"} for split in sorted(sizes)],
            }
        ],
    }
    table = "\n".join(f"| {split} | {count:,} |" for split, count in sorted(sizes.items()))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# Episodes of text environments

Played in {" and ".join(environments)} by the policies {", ".join(policies)}. One row is an episode: goal and parallel
lists over its steps; step 0 is the first observation and has no action. `score` is the simulator's, 0 to 100; `look`,
`inventory` and, at the start and every few steps, `hidden_states` were read without spending a step. `variation` is a
number, or a game's name, as a string. Splits are the simulators' own: evaluate on what you have not trained on.

| split | episodes |
| --- | ---: |
{table}
"""


def export(episodes: Iterator[Episode], out: Path) -> Counter[str]:
    """Write the folder; return episodes by split.

    Raises InputError without episodes, or if `out` is a file or not empty.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} must be a folder")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: must be empty")
    sizes: Counter[str] = Counter()
    environments, policies = set(), set()
    pending: dict[str, list[dict[str, Any]]] = {}
    for episode in episodes:
        rows = pending.setdefault(episode.split, [])
        rows.append(to_row(episode))
        sizes[episode.split] += 1
        environments.add(episode.env)
        policies.add(episode.policy)
        if len(rows) == EPISODES_PER_FILE:
            _write_rows(out, episode.split, sizes[episode.split], rows)
            rows.clear()
    for split, rows in pending.items():
        if rows:
            _write_rows(out, split, sizes[split], rows)
    if not sizes:
        raise InputError("--episodes: must hold episodes, found none")
    write_lines(out / "README.md", [data_card(sizes, sorted(environments), sorted(policies))])
    return sizes


def _write_rows(out: Path, split: str, last: int, rows: list[dict[str, Any]]) -> None:
    """Write one Parquet file, named after the number of its last episode."""
    from datasets import Dataset, Features, List, Value

    text, texts = Value("string"), List(Value("string"))
    fields = dict.fromkeys(("env", "task", "variation", "split", "policy", "goal"), text)
    steps = dict.fromkeys(("action", "observation", "look", "inventory", "hidden_states"), texts)
    numbers = {"score": List(Value("float64")), "done": List(Value("bool"))}
    folder = out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    dataset = Dataset.from_list(rows, features=Features({**fields, **steps, **numbers}))
    dataset.to_parquet(folder / f"{split}-{last:07d}.parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--out", type=Path, required=True, help="new folder")


def run(args: argparse.Namespace) -> None:
    files = tqdm(line_files(args.episodes), unit="file", desc="export")
    sizes = export((episode for path in files for episode in read_episodes(path)), args.out)
    print(f"{args.out}: " + ", ".join(f"{count:,} episodes of {split}" for split, count in sorted(sizes.items())))
