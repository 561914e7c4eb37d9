"""Windows that occur in train episodes: the table of a suite, written by `python -m lab build-seen`."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from eval.scores.metrics import DATA
from eval.scores.suites import Suite
from loopwm.records.errors import InputError
from loopwm.records.training_episodes import TrainingEpisodes, digest
from loopwm.records.windows import Window, game_of


@dataclass(frozen=True)
class Seen:
    """Table of a suite.

    horizons: by window, those at which it is seen; `seen` in the file. episodes_sha256: of the texts read, in order.
    hashes_sha256: `digest` of the episodes' hashes in checkpoints.
    """

    suite: str
    suite_sha256: str
    episodes_sha256: str
    hashes_sha256: str
    episodes: int
    transitions: int
    horizons: dict[str, list[int]]

    def at(self, window: Window, horizon: int) -> bool:
        return horizon in self.horizons.get(window["id"], ())

    @property
    def training_set(self) -> dict[str, str | int]:
        """Return the training set that `unseen` and `seen` refer to."""
        return {name: getattr(self, name) for name in ("episodes_sha256", "episodes", "transitions")}


def environment_of(suite: Suite) -> str:
    """Return the one environment of a suite. Raises InputError for several."""
    envs = sorted({window["env"] for window in suite.windows})
    if len(envs) > 1:
        raise InputError(
            f"--suites: {suite.name}: must be of one environment, got {' and '.join(envs)}; give a file for each"
        )
    return envs[0]


def table_path(suite: str) -> Path:
    return DATA / f"seen-{suite}.json.gz"


def find_seen(suite: Suite, file: Path | None) -> Seen | None:
    """Return the table given, else the committed one of these very windows, else None.

    Raises InputError for a file that is not a table, or a given one of other windows.
    """
    path = table_path(suite.name) if file is None else file
    if file is None and not path.is_file():
        return None
    table = load_table(path)
    is_same = table.suite_sha256 == suite.sha256
    if file is not None and not is_same:
        raise InputError(f"--seen: {path} must be of these windows, got {table.suite!r} ({table.suite_sha256[:12]})")
    return table if is_same else None


def seen_by_checkpoint(
    suite: Suite, trained: TrainingEpisodes | None, table: Seen | None, file: Path | None
) -> Seen | None:
    """Return the table if it is about the episodes that a checkpoint was trained on, None for unknown.

    Args:
        suite: to be evaluated on.
        trained: of the checkpoint; None for one without a record, for which only a table that was given counts.
        table: of --seen, or the suite's committed one; None for none.
        file: that of --seen.

    Raises InputError for a suite with a game that the checkpoint was trained on, and a given table of other episodes.
    """
    if trained is None:
        return table if file is not None else None
    for window in suite.windows:
        game = game_of(window)
        if window["variation"] is not None and trained.holds_game(window["env"], game):
            raise InputError(
                f"--suite: {suite.name}: window {window['id']}: the checkpoint was trained on its game {game}: take "
                "windows of another split"
            )
    if table is None or table.hashes_sha256 == digest(trained.episodes(environment_of(suite))):
        return table
    if file is not None:
        raise InputError(f"--seen: {file} must be of the train episodes of --model")
    return None


def load_table(path: Path) -> Seen:
    """Read a table. Raises InputError naming the file."""
    try:
        record = dict(json.loads(gzip.decompress(path.read_bytes())))
        return Seen(horizons=record.pop("seen"), **record)
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: must be a table of seen windows ({error})") from error
