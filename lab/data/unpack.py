"""Unpack collected episodes, so that collecting resumes there.

A pack is a tar archive under one xz stream with a window over many episodes, which are repetitive: it takes about 17
bytes a transition, a tenth of files of ten episodes. `lab/data/pack.py` writes them. Unpacked files equal the packed
ones byte for byte. Existing files are not overwritten.
"""

from __future__ import annotations

import argparse
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data_prep.plan import PLAN
from data_prep.solutions import PACKED
from loopwm.records.errors import InputError
from loopwm.records.files import XZ_PRESET, write_atomic

EXAMPLE = "python -m lab unpack --out data/episodes"

SUFFIX = ".tar.xz"
EPISODES = ".jsonl.xz"


def unpack(path: Path, out: Path) -> int:
    """Write the files of a pack below `out`, except existing ones. Return the number written.

    Raises InputError for a file that is not a pack, or a folder of another plan.
    """
    written = 0
    for name, content in members(path):
        target = out / name
        if name.endswith(EPISODES):
            content = lzma.compress(content, preset=XZ_PRESET)
        if target.name == PLAN and target.exists() and target.read_bytes() != content:
            raise InputError(f"{target}: must have the plan of {path}")
        if not target.exists():
            write_atomic(target, content)
            written += 1
    return written


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with lzma.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is None or ".." in Path(member.name).parts or Path(member.name).is_absolute():
                    raise InputError(f"{path}: must hold episode files only, got {member.name!r}")
                yield member.name, content.read()
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise InputError(f"{path}: must be a complete pack ({error})") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packs", nargs="*", type=Path, help="packs (default: those of the project)")
    parser.add_argument("--out", type=Path, required=True, help="folder to unpack to")


def run(args: argparse.Namespace) -> None:
    packs = args.packs or sorted(PACKED.glob(f"*{SUFFIX}"))
    if not packs:
        raise InputError("packs: must be named where none are installed; they come with the repository only")
    for path in packs:
        print(f"{path}: {unpack(path, args.out)} files")
