"""Pack a folder of collected episodes, or solutions, into one small file that comes with the project."""

from __future__ import annotations

import argparse
import io
import json
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from data_prep.collect import FAILED
from data_prep.plan import PLAN
from data_prep.solutions import packed_solutions, read_solution
from lab.data.unpack import EPISODES, SUFFIX, members
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write, write_lines

EXAMPLE = "python -m lab pack --folder data/episodes/train-gold --out train-gold.tar.xz"

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]
"""128 MiB, the memory needed for unpacking."""


def pack(folder: Path, earlier: Sequence[Path], out: Path) -> int:
    """Pack the plan and the files of episodes that are in none of the earlier packs. Return their number.

    Raises InputError for a folder that was not collected, and if no file is left.
    """
    if not (folder / PLAN).is_file():
        raise InputError(f"{folder}: must be a folder of collected episodes with a {PLAN}")
    packed_before = {Path(name).name for other in earlier for name, _ in members(other)}
    files = sorted(path for path in folder.glob(f"*{EPISODES}") if path.name not in packed_before)
    if not files:
        raise InputError(f"{folder}: no episode files" + (" but those that are packed" if earlier else ""))
    with (
        atomic_write(out) as raw,
        lzma.open(raw, "wb", filters=_FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, f"{folder.name}/{PLAN}", (folder / PLAN).read_bytes())
        for path in tqdm(files, unit="file", desc=folder.name):
            _add(archive, f"{folder.name}/{path.name}", lzma.decompress(path.read_bytes()))
            failed = folder / FAILED / path.name.replace(EPISODES, ".txt")
            if failed.exists():
                _add(archive, f"{folder.name}/{FAILED}/{failed.name}", failed.read_bytes())
    return len(files)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file without owner and time, so that the bytes depend on the contents only."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def pack_solutions(folder: Path, out: Path) -> int:
    """Write the solutions of an environment's folder, and those packed before, to one file.

    Returns their number. Raises InputError for a folder without solutions.
    """
    solutions = {
        (path.parent.name, int(path.stem) if path.stem.isdecimal() else path.stem): read_solution(path)
        for path in folder.glob("*/*.json")
    }
    if not solutions:
        raise InputError(f"{folder}: must hold solutions (TASK/VARIATION.json), found none")
    solutions |= {place: list(actions) for place, actions in packed_solutions(folder.name).items()}
    records = [
        {"task": task, "variation": variation, "actions": solutions[task, variation]}
        for task, variation in sorted(solutions, key=lambda place: (place[0], str(place[1]).zfill(6)))
    ]
    write_lines(out, (json.dumps(record, separators=(",", ":")) for record in records))
    return len(records)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--folder", type=Path, help="folder of collected episodes")
    job.add_argument("--solutions", type=Path, help="folder of an environment's solutions, packed as .jsonl.xz")
    parser.add_argument("--without", nargs="+", type=Path, default=[], help="packs whose files are left out")
    parser.add_argument("--out", type=Path, required=True, help=f"pack, NAME{SUFFIX}")


def run(args: argparse.Namespace) -> None:
    if args.solutions is not None:
        count = f"{pack_solutions(args.solutions, args.out):,} solutions"
    else:
        count = f"{pack(args.folder, args.without, args.out)} files"
    print(f"{args.out}: {count}, {args.out.stat().st_size:,} bytes")
