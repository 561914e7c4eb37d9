"""Reading JSON lines (plain, gzip, xz), and writing files that appear whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from loopwm.records.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError)


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. Raises InputError naming file and line."""
    for number, line in read_lines(path):
        yield number, parse_object(line, f"{path}: line {number}")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not blank. Raises InputError naming file and line."""
    number = 0
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except _UNREADABLE as error:
        raise InputError(f"{path}: line {number + 1}: unreadable ({error})") from error


def parse_json_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. Raises InputError naming `path` and line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, parse_object(line, f"{path}: line {number}")


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def parse_object(line: str, where: str) -> dict[str, Any]:
    """Raises InputError, led by `where`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object")
    return record


def line_files(paths: Iterable[Path]) -> list[Path]:
    """The given files, and the JSON-lines files below given folders, sorted. Raises InputError if one is missing."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.jsonl*") if p.name.endswith(SUFFIXES) and p.name[0] != ".")
            if not found:
                raise InputError(f"{path}: no files that end in {', '.join(SUFFIXES)}")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return files


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a temporary file in the same folder, syncs it, and renames it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def pack_gzip(content: str) -> bytes:
    """Gzip bytes that depend on the content alone (no time, no file name)."""
    return gzip.compress(content.encode(), 9, mtime=0)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises InputError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: unreadable ({error})") from error


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
