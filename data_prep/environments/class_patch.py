"""Gives a compiled Java class the `hashCode` that its `equals` calls for.

ScienceWorld's objects are equal when their `uuid` is, but hash by identity, so the order of its hash sets, and with it
gold paths and parts of its worlds, changes from run to run. The ids are counted from the start of each world, so with
this method the order depends on the world alone:

    public int hashCode() { return (int) uuid(); }

Layout of class files: The Java Virtual Machine Specification, chapter 4.
"""

from __future__ import annotations

from struct import pack, unpack_from

_ENTRY_BYTES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
"""Size of a constant by its tag; UTF-8 (tag 1) tells its own."""

_TWO_SLOTS = (5, 6)
_PUBLIC = 0x0001


def add_hash_code(class_file: bytes) -> bytes:
    """The class with a public `hashCode` made of its `long uuid()`. The class must not have one already."""
    count = unpack_from(">H", class_file, 8)[0]
    pool_end = _skip_constants(class_file, 10, count)
    this_class, interfaces = unpack_from(">HxxH", class_file, pool_end + 2)
    methods = _skip_members(class_file, pool_end + 8 + 2 * interfaces)
    method_count = unpack_from(">H", class_file, methods)[0]
    constants = [_utf8("hashCode"), _utf8("()I"), _utf8("Code"), _utf8("uuid"), _utf8("()J")]
    constants.append(pack(">BHH", 12, count + 3, count + 4))  # NameAndType uuid ()J
    constants.append(pack(">BHH", 10, this_class, count + 5))  # Methodref of this class
    return b"".join(
        (
            class_file[:8],
            pack(">H", count + len(constants)),
            class_file[10:pool_end],
            *constants,
            class_file[pool_end:methods],
            pack(">H", method_count + 1),
            _method(name=count, descriptor=count + 1, code=count + 2, uuid=count + 6),
            class_file[methods + 2 :],
        )
    )


def _method(name: int, descriptor: int, code: int, uuid: int) -> bytes:
    body = pack(">BBHBB", 0x2A, 0xB6, uuid, 0x88, 0xAC)  # aload_0, invokevirtual uuid, l2i, ireturn
    attribute = pack(">HHI", 2, 1, len(body)) + body + pack(">HH", 0, 0)  # stack, locals, code; no exceptions
    return pack(">HHHHHI", _PUBLIC, name, descriptor, 1, code, len(attribute)) + attribute


def _utf8(text: str) -> bytes:
    return pack(">BH", 1, len(text)) + text.encode()


def _skip_constants(data: bytes, offset: int, count: int) -> int:
    index = 1
    while index < count:
        tag = data[offset]
        offset += 3 + unpack_from(">H", data, offset + 1)[0] if tag == 1 else 1 + _ENTRY_BYTES[tag]
        index += 2 if tag in _TWO_SLOTS else 1
    return offset


def _skip_members(data: bytes, offset: int) -> int:
    """Skips a counted list of fields (or methods), each with its attributes."""
    (count,) = unpack_from(">H", data, offset)
    offset += 2
    for _ in range(count):
        (attributes,) = unpack_from(">H", data, offset + 6)
        offset += 8
        for _ in range(attributes):
            offset += 6 + unpack_from(">I", data, offset + 2)[0]
    return offset
