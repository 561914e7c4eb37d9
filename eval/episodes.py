"""Train episodes, what the baselines learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from eval.errors import EvalError
from eval.files import line_files, read_json_lines

EXPERTS = ("gold", "expert")

TRAIN_SPLITS = ("train", "built")
"""ALFWorld's built games are made to train on."""


@dataclass(frozen=True)
class Episode:
    """steps: (action, observation) pairs, stripped; the first holds the first observation and an empty action."""

    env: str
    policy: str
    goal: str
    steps: tuple[tuple[str, str], ...]


def read_train_episodes(paths: Iterable[Path]) -> Iterator[Episode]:
    """The episodes of files and folders. Raises EvalError for one that is not of the train split."""
    for path in line_files(paths):
        for line, record in tqdm(read_json_lines(path), desc=path.name, unit="episode", leave=False):
            try:
                split = record["split"]
                first, *later = record["steps"]
                steps = [("", first["observation"].strip())]
                steps += [(step["action"].strip(), step["observation"].strip()) for step in later]
                if not all(action for action, _ in steps[1:]):
                    raise ValueError("an action is empty")
                episode = Episode(record["env"], record["policy"], record["goal"], tuple(steps))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise EvalError(f"{path}: line {line}: not an episode ({error})") from error
            if split not in TRAIN_SPLITS:
                raise EvalError(f"{path}: line {line}: split: is {split!r}, baselines learn from train alone")
            yield episode
