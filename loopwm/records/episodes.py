"""Episodes recorded in a simulator, one JSON object a line in `.jsonl`, `.jsonl.gz` or `.jsonl.xz`.

    {"env", "task", "variation" (int, or a game's name), "split", "policy", "goal", "hidden_state" (or null),
     "steps": [{"action": null, "observation", "score", "done", "look", "inventory"}, {"action": "open door", ...}]}

Step 0 has the first observation and no action. `look`, `inventory` and `hidden_state` may be null. The episode's
`hidden_state` is that of step 0; a later step has the field only if it was sampled there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopwm.records.errors import InputError, naming
from loopwm.records.files import LONE_SURROGATE, line_files, parse_object, read_lines, write_lines


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the agent saw it. `score` is the simulator's, 0 to 100; `done` its own flag."""

    action: str | None
    observation: str
    score: float
    done: bool
    look: str | None = None
    inventory: str | None = None
    hidden_state: str | None = None
    """After the step, if it was sampled; that of step 0 is a field of the episode."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One play of one variation."""

    env: str
    task: str
    variation: int | str
    split: str
    policy: str
    goal: str
    steps: tuple[Step, ...]
    hidden_state: str | None = None

    def hidden_state_at(self, step: int) -> str | None:
        """Return the hidden state after a step; None if it was not sampled."""
        return self.hidden_state if step == 0 else self.steps[step].hidden_state


_OPTIONAL_TEXT = (str, type(None))
_EPISODE_FIELDS: dict[str, tuple[type, ...]] = {
    "env": (str,), "task": (str,), "variation": (int, str), "split": (str,), "policy": (str,), "goal": (str,),
    "hidden_state": _OPTIONAL_TEXT, "steps": (list,),
}  # fmt: skip
_STEP_FIELDS: dict[str, tuple[type, ...]] = {
    "action": _OPTIONAL_TEXT, "observation": (str,), "score": (int, float), "done": (bool,),
    "look": _OPTIONAL_TEXT, "inventory": _OPTIONAL_TEXT, "hidden_state": _OPTIONAL_TEXT,
}  # fmt: skip


def parse_episode(line: str) -> Episode:
    """Parse one line. Raises InputError naming the field at fault."""
    return to_episode(parse_object(line))


def to_episode(record: Mapping[str, Any]) -> Episode:
    """Check the fields of a record. Raises InputError naming the field at fault."""
    fields = _checked(record, _EPISODE_FIELDS, "")
    if not fields["steps"]:
        raise InputError("steps: at least the first observation is needed")
    fields["steps"] = tuple(_parse_step(step, i) for i, step in enumerate(fields["steps"]))
    return Episode(**fields)


def _parse_step(record: Any, index: int) -> Step:
    prefix = f"steps[{index}]."
    if not isinstance(record, dict):
        raise InputError(f"{prefix[:-1]}: expected a JSON object")
    fields = _checked(record, _STEP_FIELDS, prefix)
    if (fields["action"] is None) != (index == 0):
        raise InputError(f"{prefix}action: null in the first step and nowhere else")
    if index and not fields["action"].strip():
        raise InputError(f"{prefix}action: must not be empty")
    return Step(**fields)


def _checked(record: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], prefix: str) -> dict[str, Any]:
    """Return the known fields of `record`; an absent nullable field is None."""
    values: dict[str, Any] = {}
    for name, allowed in types.items():
        if name not in record and type(None) not in allowed:
            raise InputError(f"{prefix}{name}: missing")
        value = record.get(name)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise InputError(f"{prefix}{name}: unexpected {type(value).__name__}")
        if isinstance(value, str) and LONE_SURROGATE.search(value):
            raise InputError(f"{prefix}{name}: must be valid Unicode, got a lone surrogate")
        values[name] = value
    return values


def format_episode(episode: Episode) -> str:
    """Format the episode as one line of JSON."""
    record = asdict(episode)
    for step in record["steps"]:
        if step["hidden_state"] is None:
            del step["hidden_state"]
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def read_episodes(path: Path) -> Iterator[Episode]:
    """Yield the episodes of one file in order. Raises InputError naming file, line and field."""
    for number, line in read_lines(path):
        with naming(f"{path}: line {number}: "):
            yield parse_episode(line)


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """Write episodes atomically, compressed by suffix."""
    write_lines(path, map(format_episode, episodes))


def recorded_episodes(paths: Iterable[Path]) -> list[Episode]:
    """Read the episodes of files and folders in order. Raises InputError naming file, line and field."""
    return [episode for path in line_files(paths) for episode in read_episodes(path)]


TRAIN_SPLITS = ("train", "built")
"""Splits to train on: built games are ALFWorld's train games made from floor plans."""
