"""Names that ScienceWorld's compiled classes give their objects, read from the simulator's jar without running it.

A class names an object by `this.name = "glass cup"`, compiled to `ldc "glass cup"; invokevirtual name_$eq`. The
format of class files is chapter 4 of the Java Virtual Machine specification.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from loopwm.records.errors import InputError

_UTF8, _STRING, _METHOD, _DOUBLE_SLOT = 1, 8, 10, (5, 6)
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
_LOAD_AND_CALL = re.compile(rb"(?:\x12(.)|\x13(..))\xb6(..)", re.DOTALL)

Constant = tuple[int, bytes]


def read_classes(jar: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of the classes below the folders. Raises InputError if the file is not a jar."""
    try:
        with zipfile.ZipFile(jar) as archive:
            for path in sorted(archive.namelist()):
                if path.endswith(".class") and path.startswith(folders):
                    yield path, archive.read(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{jar}: not a readable jar ({error})") from error


def assigned_names(class_file: bytes) -> set[str]:
    """The string constants a class hands to the setter of `name`."""
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
    """The constants by index, each as (tag, payload), and the offset of what follows the pool."""
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
