"""What could be computed again and is kept: keys and values of prompts and of worlds, in one budget of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from loopwm.core import CoreState, allocated_bytes

BLOCK = 16
"""Prompts are compared block by block; shorter beginnings are not worth keeping."""


class PrefixCache:
    """The least recently used goes first when all keys and values of the process, running ones included, take more than
    `most_bytes`. Several threads may use it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._blocks: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
        """The newest prompt that begins with these blocks."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any:
        """What is kept under a key, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
        self.make_room(0)

    def drop(self, key: Hashable) -> None:
        """Does nothing where there is nothing."""
        with self._lock:
            self._kept.pop(key, None)

    def make_room(self, needed: int) -> bool:
        """Lets go what was not used for the longest time until so many bytes are free; whether they are. For more than
        there can be nothing has to go."""
        with self._lock:
            while needed <= self.most_bytes < allocated_bytes() + needed and self._kept:
                self._kept.popitem(last=False)
        return allocated_bytes() + needed <= self.most_bytes

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._blocks.clear()

    def put_prompt(self, ids: tuple[int, ...], loops: int, state: CoreState) -> None:
        """Keeps the state of these tokens, one row without padding, which must not change any more."""
        if len(ids) < BLOCK:
            return
        with self._lock:
            for name in _blocks(ids, loops):
                self._blocks[name] = loops, ids
            if len(self._blocks) > 4 * BLOCK * len(self._kept) + 10_000:
                self._blocks = {name: key for name, key in self._blocks.items() if key in self._kept}
        self.put((loops, ids), state)

    def prompt(self, ids: tuple[int, ...], loops: int) -> CoreState | None:
        """The state of the longest known beginning of these tokens, as long as they are at most: a copy to go on
        with."""
        with self._lock:
            known = None
            for name in _blocks(ids, loops):
                if (key := self._blocks.get(name)) is None or key not in self._kept:
                    break
                known = key
            state: CoreState | None = None if known is None else self.get(known)
            if known is None or state is None:
                return None
            common = _common(known[1], ids)
            return state.fork() if common == state.length else state.crop(state.length - common)


def _blocks(ids: Sequence[int], loops: int) -> list[Hashable]:
    """A name for each beginning of whole blocks."""
    names: list[Hashable] = []
    name = hash(loops)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        name = hash((name, tuple(ids[end - BLOCK : end])))
        names.append(name)
    return names


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of what both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
