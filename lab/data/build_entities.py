"""Build the list of ScienceWorld's own names from the simulator's jar and from train episodes.

The jar (part of the `scienceworld` package) gives the names that its classes assign, the trees with their seeds and
the animals with their eggs. Train episodes give names created with a world, such as rooms, coloured wires and surfaces:
the words after an article in look and inventory texts. Letters and numbers that distinguish equal things are expanded
(`unknown substance a` to `z`, `flower pot 0` to `9`). Words for a state (`adult`, `dead`, `liquid`) are not part of a
name, and names of kinds that no observation shows (`living thing`) are left out.

A class names an object by `this.name = "glass cup"`, compiled to `ldc "glass cup"; invokevirtual name_$eq`. The
format of class files is chapter 4 of the Java Virtual Machine specification.
"""

from __future__ import annotations

import argparse
import re
import string
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.environments.scienceworld.names import ENTITIES
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, read_json_lines, write_atomic

FOLDERS = ("scienceworld/objects/", "scienceworld/tasks/", "scienceworld/environments/")
STATES = frozenset((
    "adult", "baby", "hatchling", "juvenile", "dead", "wilting", "liquid", "solid", "gaseous", "burned", "round",
    "square", "wrinkly", "reproducing",
))  # fmt: skip
KINDS = frozenset((
    "animal", "component", "container", "cooling source", "device", "document", "generator", "heat source",
    "living thing", "location", "plant", "renewable generator", "sittable", "substance", "unknown",
    "wandering animal", "nothing", "plane", "seedling", "artist", "fruiting tree", "fruiting seed", "universe",
))  # fmt: skip
LETTERED = ("unknown substance {}", "unknown {} plant", "unknown {} seed", "unknown material {}", "inclined plane {}")
NUMBERED = ("flower pot {}", "self watering flower pot {}", "bee {}", "terminal {}")

_AFTER_ARTICLE = re.compile(
    r"\b(?:[Aa]n?|[Tt]he|substance called|called the)\s+([A-Za-z][A-Za-z' -]*?)"
    r"(?=\s*(?:[,.()\n]|$|which\b|with\b|titled\b|currently\b|door\b|is\b|in the\b|on the\b|into\b|from\b"
    r"|surface\b|approximately\b|\d))"
)
_NOT_A_NAME = re.compile(r"\b(?:reads?|temperature|height|wireits|stage|at|of|on|to|[a-z])\b")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

EXAMPLE = "python -m lab build-entities --jar scienceworld.jar --episodes data/episodes/train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jar", type=Path, required=True, help="scienceworld.jar of the scienceworld package")
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="train episodes, files or folders")
    parser.add_argument("--out", type=Path, default=ENTITIES, help="list of names, one a line")


def run(args: argparse.Namespace) -> None:
    names = set(jar_names(args.jar)) | set(episode_names(args.episodes)) | set(designated_names())
    entities = sorted(name for name in names if name not in KINDS)
    write_atomic(args.out, "\n".join(entities) + "\n")
    print(f"{args.out}: {len(entities)} names")


def jar_names(jar: Path) -> Iterator[str]:
    for path, class_file in read_classes(jar, FOLDERS):
        yield from (name.lower() for name in assigned_names(class_file))
        words = _CAMEL.sub(" ", Path(path).stem.rstrip("$")).lower()
        if "/plant/" in path and words.endswith(" tree"):
            yield from (words, words.removesuffix("tree") + "seed")
        if "/animals/" in path and words not in KINDS:
            yield from (words, words + " egg")


def episode_names(paths: Iterable[Path]) -> Iterator[str]:
    for path in line_files(paths):
        for _, episode in read_json_lines(path):
            shown = {step[field] or "" for step in episode["steps"] for field in ("look", "inventory")}
            names = {without_state(phrase) for text in shown for phrase in _AFTER_ARTICLE.findall(text)}
            yield from (name for name in names if name and not _NOT_A_NAME.search(name))


def without_state(phrase: str) -> str:
    words = phrase.lower().removeprefix("substance called ").split()
    while words and words[0] in STATES:
        words = words[1:]
    return " ".join(words)


def designated_names() -> Iterator[str]:
    yield from (form.format(letter) for form in LETTERED for letter in string.ascii_lowercase)
    yield from (form.format(digit) for form in NUMBERED for digit in range(10))


_UTF8, _STRING, _METHOD, _DOUBLE_SLOT = 1, 8, 10, (5, 6)
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
_LOAD_AND_CALL = re.compile(rb"(?:\x12(.)|\x13(..))\xb6(..)", re.DOTALL)

Constant = tuple[int, bytes]


def read_classes(jar: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the classes below the folders. Raises InputError if the file is not a jar."""
    try:
        with zipfile.ZipFile(jar) as archive:
            for path in sorted(archive.namelist()):
                if path.endswith(".class") and path.startswith(folders):
                    yield path, archive.read(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{jar}: must be a readable jar ({error})") from error


def assigned_names(class_file: bytes) -> set[str]:
    """Return the string constants that a class passes to the setter of `name`."""
    pool, code_start = _constant_pool(class_file)
    names = set()
    for short, wide, method in _LOAD_AND_CALL.findall(class_file[code_start:]):
        constant = pool.get(int.from_bytes(short or wide))
        target = pool.get(int.from_bytes(method))
        if constant and target and constant[0] == _STRING and target[0] == _METHOD:
            _, name_and_type = struct.unpack(">HH", target[1])
            (name_index,) = struct.unpack_from(">H", pool[name_and_type][1])
            if pool[name_index][1] == b"name_$eq":
                names.add(pool[int.from_bytes(constant[1])][1].decode())
    return names


def _constant_pool(class_file: bytes) -> tuple[dict[int, Constant], int]:
    """Return the constants by index as (tag, payload), and the offset of the end of the pool."""
    (count,) = struct.unpack_from(">H", class_file, 8)
    pool: dict[int, Constant] = {}
    index, offset = 1, 10
    while index < count:
        tag = class_file[offset]
        start = offset + (3 if tag == _UTF8 else 1)
        size = struct.unpack_from(">H", class_file, offset + 1)[0] if tag == _UTF8 else _SIZES[tag]
        pool[index] = (tag, class_file[start : start + size])
        index += 2 if tag in _DOUBLE_SLOT else 1
        offset = start + size
    return pool, offset
