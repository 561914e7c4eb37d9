"""Collection plan: options and work chunks.

The seed alone decides which variations are played, and all chance in an episode. `plan.json` holds the options; a run
with others refuses the folder.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from data_prep.environments import make_environment
from data_prep.environments.base import Environment
from data_prep.policies import POLICIES
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_json

CHUNK = 10
"""Episodes a file, few enough that a kill loses little."""

PLAN = "plan.json"

SOLVERS = ("gold", "expert")
"""Policies that play a solution; an environment has one of them."""


@dataclass(frozen=True)
class CollectionPlan:
    """Options of a collection. tasks: empty for all."""

    env: str
    split: str
    policy: str
    episodes_per_task: int
    max_steps: int
    seed: int
    tasks: tuple[str, ...]
    hidden_every: int = 4
    """Steps from one recorded hidden state to the next."""
    plays: int = 1
    """Episodes in a row of a variation, for repeatable policies: some simulators load slower than they play."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive episodes of one task: episode `first + i` plays `variations[i]`."""

    task: str
    first: int
    variations: tuple[int | str, ...]

    @property
    def file_name(self) -> str:
        return f"{self.task}-{self.first:05d}.jsonl.xz"


def parse_shard(text: str) -> slice:
    """Parse "i/n", 1 <= i <= n, as one machine's share of the chunks. Raises InputError."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise InputError(f"--shard: must be i/n with 1 <= i <= n, got {text!r}")
    return slice(int(index) - 1, None, int(count))


def plan_chunks(plan: CollectionPlan, environment: Environment) -> list[Chunk]:
    """Return the chunks of the plan. Raises InputError for an unknown task or split."""
    if plan.split not in environment.splits():
        raise InputError(f"--split: must be one of {', '.join(environment.splits())}, got {plan.split!r}")
    if plan.policy in SOLVERS and plan.policy != environment.solver:
        raise InputError(f"--policy: must be {environment.solver!r} in {environment.name}, got {plan.policy!r}")
    unknown = sorted(set(plan.tasks) - set(environment.tasks()))
    if unknown:
        raise InputError(f"--tasks: must be some of {', '.join(environment.tasks())}, got {unknown[0]!r}")
    chunks = []
    for task in environment.tasks():
        if plan.tasks and task not in plan.tasks:
            continue
        chosen = _choose_variations(plan, task, list(environment.variations(task, plan.split)))
        for first in range(0, len(chosen), CHUNK):
            chunks.append(Chunk(task, first, tuple(chosen[first : first + CHUNK])))
    # All tasks in turn, so that an interrupted collection is balanced.
    return sorted(chunks, key=lambda chunk: chunk.first)


def _choose_variations(plan: CollectionPlan, task: str, variations: list[int | str]) -> list[int | str]:
    """Return the variations in a seeded order, repeated as needed if the policy plays them differently each time."""
    Random(f"{plan.seed}/{task}").shuffle(variations)
    if POLICIES[plan.policy].repeatable and variations:
        variations = [variation for variation in variations for _ in range(plan.plays)]
        variations *= -(-plan.episodes_per_task // len(variations))
    return variations[: plan.episodes_per_task]


def load_or_make_chunks(plan: CollectionPlan, out: Path) -> list[Chunk]:
    """Return the chunks of an existing folder, or new ones. Raises InputError if the folder has other options."""
    path = out / PLAN
    wanted: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    if path.is_file():
        document = read_json(path)
        if "order" not in document:
            raise InputError(f"{path}: must be of a collection of texts; choose another --out")
        saved = asdict(CollectionPlan(**document["order"]))  # a field that an older file lacks has its default
        for name, value in wanted.items():
            if saved[name] != value:
                raise InputError(f"{path}: {name}: must be {saved[name]!r} as in the folder, got {value!r}")
        return [Chunk(c["task"], c["first"], tuple(c["variations"])) for c in document["chunks"]]
    with closing(make_environment(plan.env)) as environment:
        chunks = plan_chunks(plan, environment)
    write_json(path, {"order": wanted, "chunks": [asdict(c) for c in chunks]})
    return chunks
