"""Reading and writing files: compression by suffix, and files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from loopwm.records.errors import InputError

XZ_PRESET = 3
"""Of .xz files: five times as fast as lzma's default of 6, and episodes are as small."""

LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
"""Suffixes of files of JSON lines."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError)
"""Exceptions from reading a damaged text file, compressed or not."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""What JSON can spell and UTF-8 cannot."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

HIDDEN_DISK_ERROR = re.compile(
    rf"unexpected pos|PytorchStreamWriter failed|os error ({'|'.join(map(str, DISK_ERRORS))})\b"
)
"""Messages of torch and safetensors for a failed write, which do not say what the system reported."""

PACKAGED = Path(__file__).parents[1] / "pretrained"
"""Checkpoint that comes with the package."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise InputError naming `path` for a full or broken disk inside the block: the system names no file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            reason = error.strerror
        elif HIDDEN_DISK_ERROR.search(str(error)):
            reason = "write failed"
        else:
            raise
        raise InputError(f"{path}: {reason}; make room on the disk and rerun the command") from error


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder beside `path` to it, replacing a folder there.

    Everything inside is synced first, since a rename can reach the disk before the renamed contents. An old folder is
    renamed before it is deleted: a kill must not leave half of it.
    """
    with writing(path):
        _sync(temporary)
        if path.is_dir():
            path.rename(old := path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        _sync_one(path.parent)


def _sync(path: Path) -> None:
    """Sync a file, or a folder with its contents."""
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


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` complete or not at all.

    The temporary name is random: processes of several machines may write the same file in a shared folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with writing(path), temporary.open("xb") as file:
            yield file
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines atomically, compressed by suffix. The bytes depend on the lines only (no time, no file name)."""
    with atomic_write(path) as raw, _compressor(path, raw) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


@contextmanager
def _compressor(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            yield cast(BinaryIO, packed)
    elif path.suffix == ".xz":
        with lzma.open(raw, "wb", preset=XZ_PRESET) as packed:
            yield cast(BinaryIO, packed)
    else:
        yield raw


def open_text(path: Path) -> TextIO:
    """Open `.gz`, `.xz` or plain text for reading. Raises InputError if the file cannot be opened."""
    openers: dict[str, Callable[..., TextIO]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        return openers.get(path.suffix, open)(path, "rt", encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of every line that is not blank. Raises InputError naming file and line."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
        except UNREADABLE as error:
            raise InputError(f"{path}: line {number + 1}: unreadable ({error})") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every line that is not blank. Raises InputError naming file and line."""
    for number, line in read_lines(path):
        yield number, parse_object(line, f"{path}: line {number}")


def parse_object(line: str, where: str = "") -> dict[str, Any]:
    """Parse a JSON object. Raises InputError that starts with `where`, if it is not empty."""
    where = where and f"{where}: "
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}not JSON (a number too long, or too deep a nesting)") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}expected a JSON object")
    return record


def line_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the JSON-lines files below given folders, sorted; each once.

    Raises InputError if one is missing.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*.jsonl*") if p.name.endswith(LINES) and p.name[0] != ".")
            if not matches:
                raise InputError(f"{path}: no files that end in {', '.join(LINES)}")
            files += matches
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return list({file.resolve(): file for file in files}.values())


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises InputError naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: unreadable ({error})") from error


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_of_files(folder: Path, suffixes: Sequence[str]) -> str:
    """Hash names and contents of the files with these suffixes directly in a folder, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in suffixes):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
