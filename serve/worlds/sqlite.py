"""SQLite file of world sessions, written before each response, so that worlds survive a restart."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwm.records.errors import InputError

FORMAT = 2
TABLE = "CREATE TABLE IF NOT EXISTS worlds (id TEXT PRIMARY KEY, used REAL NOT NULL, world TEXT NOT NULL) WITHOUT ROWID"


@dataclass(frozen=True)
class SavedWorld:
    """Row of the file.

    used: time of the last use, in seconds since 1970.
    world: other fields of the session.
    """

    id: str
    used: float
    world: dict[str, Any]


class WorldFile:
    """File of one running service. Changes are atomic: the service may be killed at any time."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises InputError if it has another format or is in use."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise InputError(f"{path}: must have worlds of format {FORMAT}, got {version}")
            self._db.execute(TABLE)
            self._db.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.Error as error:
            raise InputError(f"{path}: {error}") from error

    def read(self) -> list[SavedWorld]:
        """Return all worlds, the least recently used first."""
        rows = self._db.execute("SELECT id, used, world FROM worlds ORDER BY used")
        return [SavedWorld(name, used, json.loads(world)) for name, used, world in rows]

    def write(self, worlds: Iterable[SavedWorld], removed: Sequence[str] = ()) -> None:
        """Insert or replace worlds, and delete removed ones, in one transaction."""
        rows = [(one.id, one.used, json.dumps(one.world, ensure_ascii=False)) for one in worlds]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO worlds VALUES (?, ?, ?)", rows)
            self._db.executemany("DELETE FROM worlds WHERE id = ?", [(name,) for name in removed])

    def close(self) -> None:
        self._db.close()
