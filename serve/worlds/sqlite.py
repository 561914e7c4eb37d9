"""SQLite file of world sessions, appended to before each response, so that worlds survive a restart."""

from __future__ import annotations

import gc
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loopwm.records.errors import InputError, naming

FORMAT = 3
TABLES = """CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY, world TEXT NOT NULL, change TEXT NOT NULL, answered TEXT);
CREATE INDEX IF NOT EXISTS changes_of_a_world ON changes (world)"""

FROM_FORMAT_2 = """INSERT INTO changes (world, change) SELECT id, json_set(world, '$.used', used) FROM worlds;
DROP TABLE worlds"""


class StorageError(RuntimeError):
    """The file cannot be written now; nothing has changed."""


class Change(NamedTuple):
    """Row of the file: a whole world if it has a "log", which replaces all earlier rows; else what a step adds."""

    world: str
    fields: dict[str, Any]
    answered: Sequence[str] | None = None


class WorldFile:
    """File of one running service. Changes are atomic: the service may be killed at any time."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises InputError if it has another format or is in use."""
        self._path = path
        with naming(f"{path}: ", sqlite3.Error):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            # FULL returns the pages of deleted worlds; it must precede everything that writes a new file.
            for pragma in ("auto_vacuum = FULL", "locking_mode = EXCLUSIVE", "journal_mode = WAL"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 2, FORMAT):
                raise InputError(f"{path}: must have worlds of format {FORMAT}, got {version}")
            upgrade = f"{FROM_FORMAT_2};" if version == 2 else ""
            self._db.executescript(f"BEGIN; {TABLES}; {upgrade} PRAGMA user_version = {FORMAT}; COMMIT")

    def read(self) -> Iterator[Change]:
        """Yield all rows in the order in which they were written. Raises InputError for a damaged file."""
        gc.disable()  # of many worlds none is garbage: to look through them again and again took half of the time
        try:
            for world, fields, answer in self._db.execute(
                "SELECT world, change, answered FROM changes ORDER BY number"
            ):
                yield Change(world, json.loads(fields), answer and json.loads(answer))
        except (sqlite3.Error, ValueError) as error:
            raise InputError(f"{self._path}: {error}") from error
        finally:
            gc.enable()

    def write(self, changes: Sequence[Change], removed: Iterable[str] = ()) -> None:
        """Append changes and delete removed worlds, in one transaction. Raises StorageError."""
        replaced = [(change.world,) for change in changes if "log" in change.fields]
        rows = [
            (one.world, json.dumps(one.fields, ensure_ascii=False), one.answered and json.dumps(one.answered))
            for one in changes
        ]
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("DELETE FROM changes WHERE world = ?", [*replaced, *((name,) for name in removed)])
                # Only the last answer of a world is repeated.
                clear = "UPDATE changes SET answered = NULL WHERE world = ? AND answered IS NOT NULL"
                self._db.executemany(clear, [row[:1] for row in rows])
                self._db.executemany("INSERT INTO changes (world, change, answered) VALUES (?, ?, ?)", rows)
                # Writes a page even without changes: this shows whether a full disk has room again.
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.OperationalError as error:
            raise StorageError(f"the worlds file cannot be written: {error}") from error

    def close(self) -> None:
        self._db.close()
