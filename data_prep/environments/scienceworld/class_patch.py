"""Patch compiled Java classes: `add_hash_code` adds a method, `redirect` delegates a method to another class.

ScienceWorld's objects are equal when their `uuid` is, but hash by identity, so the order of its hash sets, and with it
gold paths and parts of its worlds, changes from run to run. The ids are counted from the start of each world, so with
this method the order depends on the world only:

    public int hashCode() { return (int) uuid(); }

Layout of class files: The Java Virtual Machine Specification, chapter 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from struct import pack, unpack_from

_ENTRY_BYTES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
"""Size of a constant by its tag; UTF-8 (tag 1) holds its own."""

_TWO_SLOTS = (5, 6)
_PUBLIC = 0x0001
_STATIC = 0x0008
_REFERENCE = r"\[*L[^;]+;"


def add_hash_code(class_file: bytes) -> bytes:
    """Return the class with a public `hashCode` made of its `long uuid()`. The class must not have one already."""
    count, pool_end, methods = _layout(class_file)
    (this_class,) = unpack_from(">H", class_file, pool_end + 2)
    method_count = unpack_from(">H", class_file, methods)[0]
    constants = [_utf8("hashCode"), _utf8("()I"), _utf8("Code"), _utf8("uuid"), _utf8("()J")]
    constants.append(pack(">BHH", 12, count + 3, count + 4))  # NameAndType uuid ()J
    constants.append(pack(">BHH", 10, this_class, count + 5))  # Methodref of this class
    body = pack(">BBHBB", 0x2A, 0xB6, count + 6, 0x88, 0xAC)  # aload_0, invokevirtual uuid, l2i, ireturn
    added = pack(">HHHH", _PUBLIC, count, count + 1, 1) + _code(count + 2, 2, 1, body)
    return _patched(class_file, pool_end, constants, methods, methods + 2, pack(">H", method_count + 1) + added)


def redirect(class_file: bytes, method: str, descriptor: str, target: str) -> bytes:
    """Return the class with a method delegated to the static method of that name and descriptor in the class `target`.

    A prefix that Scala puts before the name of a private method, up to the last `$`, is dropped from the target's name.
    The method must take and return objects only, and not be static. Raises LookupError if the class has no such method.
    """
    arguments = re.fullmatch(rf"\(((?:{_REFERENCE})*)\){_REFERENCE}", descriptor)
    assert arguments is not None, f"not of objects only: {descriptor}"
    count, pool_end, methods = _layout(class_file)
    texts = dict(_texts(class_file, count))
    places = {tuple(map(texts.get, unpack_from(">HH", class_file, m[0] + 2))): m for m in _members(class_file, methods)}
    if (signature := (method.encode(), descriptor.encode())) not in places:
        raise LookupError(f"no method {method}{descriptor}")
    start, end = places[signature]
    access, name, kind = unpack_from(">HHH", class_file, start)
    assert not access & _STATIC
    constants = [_utf8("Code"), _utf8(target), pack(">BH", 7, count + 1), _utf8(method.rpartition("$")[2])]
    constants.append(pack(">BHH", 12, count + 3, kind))
    constants.append(pack(">BHH", 10, count + 2, count + 4))  # Methodref of the target
    passed = len(re.findall(_REFERENCE, arguments[1]))
    loads = b"".join(pack(">BB", 0x19, i) for i in range(1, passed + 1))  # aload; 0 is `this`
    body = loads + pack(">BHB", 0xB8, count + 5, 0xB0)  # invokestatic, areturn
    delegating = pack(">HHHH", access, name, kind, 1) + _code(count, max(1, passed), passed + 1, body)
    return _patched(class_file, pool_end, constants, start, end, delegating)


def _patched(data: bytes, pool_end: int, constants: list[bytes], start: int, end: int, content: bytes) -> bytes:
    """Append constants to the pool and replace data[start:end], which is after the pool, by `content`."""
    (count,) = unpack_from(">H", data, 8)
    pool = pack(">H", count + len(constants)) + data[10:pool_end] + b"".join(constants)
    return data[:8] + pool + data[pool_end:start] + content + data[end:]


def _code(name: int, stack: int, variables: int, body: bytes) -> bytes:
    """Return a Code attribute without exception handlers and attributes of its own."""
    return pack(">HIHHI", name, 12 + len(body), stack, variables, len(body)) + body + pack(">HH", 0, 0)


def _utf8(text: str) -> bytes:
    return pack(">BH", 1, len(text)) + text.encode()


def _layout(data: bytes) -> tuple[int, int, int]:
    """Return the constants' count, their end, and the start of the methods."""
    (count,) = unpack_from(">H", data, 8)
    *_, (_, _, pool_end) = _constants(data, count)
    (interfaces,) = unpack_from(">H", data, pool_end + 6)
    fields = pool_end + 8 + 2 * interfaces
    return count, pool_end, max((end for _, end in _members(data, fields)), default=fields + 2)


def _constants(data: bytes, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield index, start and end of each constant."""
    index, offset = 1, 10
    while index < count:
        tag = data[offset]
        end = offset + (3 + unpack_from(">H", data, offset + 1)[0] if tag == 1 else 1 + _ENTRY_BYTES[tag])
        yield index, offset, end
        index, offset = index + (2 if tag in _TWO_SLOTS else 1), end


def _texts(data: bytes, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield the UTF-8 constants by index."""
    return ((index, data[begin + 3 : end]) for index, begin, end in _constants(data, count) if data[begin] == 1)


def _members(data: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each field (or method) of a counted list, attributes included."""
    (count,) = unpack_from(">H", data, offset)
    end = offset + 2
    for _ in range(count):
        start, end = end, end + 8
        for _ in range(unpack_from(">H", data, start + 6)[0]):
            end += 6 + unpack_from(">I", data, end + 2)[0]
        yield start, end
