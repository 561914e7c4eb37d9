"""Cache of an environment's solutions: ScienceWorld takes up to a minute for one.

`packed/solutions-ENV.jsonl.xz` holds those that came with the project, one {"task", "variation", "actions"} a line; a
folder holds new ones, `ENV/TASK/VARIATION.json` each. A solution follows from task and variation only.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from data_prep.environments.base import Environment
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, write_atomic

PACKED = Path(__file__).with_name("packed")


def solve(environment: Environment, task: str, variation: int | str, folder: Path | None) -> list[str]:
    """Return the environment's solution from the cache, or compute it and store it in the folder.

    Raises SimulatorError if there is none, InputError for an invalid file.
    """
    packed = packed_solutions(environment.name).get((task, variation))
    if packed is not None:
        return list(packed)
    if folder is None:
        return environment.gold_actions(task, variation)
    path = folder / environment.name / task / f"{str(variation).replace('/', '_')}.json"
    if path.is_file():
        return read_solution(path)
    actions = environment.gold_actions(task, variation)
    write_atomic(path, json.dumps(actions) + "\n")
    return actions


def read_solution(path: Path) -> list[str]:
    actions = read_json(path)
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise InputError(f"{path}: must be a list of actions")
    return actions


@cache
def packed_solutions(env: str) -> dict[tuple[str, int | str], tuple[str, ...]]:
    path = PACKED / f"solutions-{env}.jsonl.xz"
    if not path.is_file():
        return {}
    return {(one["task"], one["variation"]): tuple(one["actions"]) for _, one in read_json_lines(path)}
