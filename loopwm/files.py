"""Files and folders that appear whole or not at all, even if the machine loses its power."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def publish(temporary: Path, path: Path) -> None:
    """Renames a finished file or folder beside `path` to it; a folder that is there is replaced.

    A rename can reach the disk before what it names, so everything inside goes there first.
    """
    _sync(temporary)
    if path.is_dir():
        shutil.rmtree(path)
    temporary.rename(path)
    _sync_one(path.parent)


def _sync(path: Path) -> None:
    """A file, or a folder with all that is in it."""
    if path.is_dir():
        for inside in path.iterdir():
            _sync(inside)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
