"""Reading and writing files: compression by suffix, and writing that never leaves a half-written file."""

from __future__ import annotations

import gzip
import lzma
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from loopwm.records.errors import InputError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at `path` complete or not at all (temporary file beside it, fsync, rename).

    The temporary's name is drawn: processes of several machines may write the same file in a shared folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_text(path: Path) -> TextIO:
    """Opens `.gz`, `.xz` or plain text for reading. Raises InputError if the file cannot be opened."""
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".xz":
            return lzma.open(path, "rt", encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes lines atomically, compressed by suffix. The bytes depend on the lines alone (no time, no file name)."""
    with atomic_write(path) as raw, _compressor(path, raw) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


@contextmanager
def _compressor(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            yield cast(BinaryIO, packed)
    elif path.suffix == ".xz":
        with lzma.open(raw, "wb") as packed:
            yield cast(BinaryIO, packed)
    else:
        yield raw
