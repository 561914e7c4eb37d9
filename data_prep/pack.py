"""Pack a folder of collected episodes into one small file, or unpack such files so that collecting resumes there.

A pack is a tar archive under one xz stream with a window over many episodes, which are repetitive: it takes about 17
bytes a transition, a tenth of files of ten episodes. Unpacked files equal the packed ones byte for byte. Existing files
are not overwritten.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from data_prep.collect import FAILED
from data_prep.plan import PLAN
from data_prep.solutions import PACKED, pack_solutions
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write

EXAMPLE = "python -m data_prep pack --folder data/episodes/train-gold --out train-gold.tar.xz"

SUFFIX = ".tar.xz"
EPISODES = ".jsonl.xz"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]
"""128 MiB, the memory needed for unpacking."""


def pack(folder: Path, earlier: Sequence[Path], out: Path) -> int:
    """Pack the plan and the files of episodes that are in none of the earlier packs. Return their number.

    Raises InputError for a folder that was not collected, and if no file is left.
    """
    if not (folder / PLAN).is_file():
        raise InputError(f"{folder}: must be a folder of collected episodes with a {PLAN}")
    packed_before = {Path(name).name for other in earlier for name, _ in _members(other)}
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


def unpack(path: Path, out: Path) -> int:
    """Write the files of a pack below `out`, except existing ones. Return the number written.

    Raises InputError for a file that is not a pack, or a folder of another plan.
    """
    written = 0
    for name, content in _members(path):
        target = out / name
        if name.endswith(EPISODES):
            content = lzma.compress(content)
        if target.name == PLAN and target.exists() and target.read_bytes() != content:
            raise InputError(f"{target}: must have the plan of {path}")
        if not target.exists():
            with atomic_write(target) as file:
                file.write(content)
            written += 1
    return written


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
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
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--folder", type=Path, help="folder of collected episodes to pack")
    job.add_argument("--unpack", nargs="*", type=Path, help="packs to unpack (default: those of the project)")
    job.add_argument("--solutions", type=Path, help="folder of an environment's solutions to pack, as .jsonl.xz")
    parser.add_argument("--without", nargs="+", type=Path, default=[], help="packs whose files are left out")
    parser.add_argument("--out", type=Path, required=True, help=f"pack, NAME{SUFFIX}; or folder to unpack to")


def run(args: argparse.Namespace) -> None:
    if args.solutions is not None:
        print(f"{args.out}: {pack_solutions(args.solutions, args.out):,} solutions, {args.out.stat().st_size:,} bytes")
        return
    if args.folder is not None:
        files = pack(args.folder, args.without, args.out)
        print(f"{args.out}: {files} files, {args.out.stat().st_size:,} bytes")
        return
    for path in args.unpack or sorted(PACKED.glob(f"*{SUFFIX}")):
        print(f"{path}: {unpack(path, args.out)} files")
