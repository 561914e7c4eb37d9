"""LRU prefix cache of prompt and world states under one memory budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any

from loopwm.core.kv_cache import KVCache, allocated_bytes

BLOCK = 16
"""Tokens of a block. Prompts are matched by whole blocks; shorter prefixes are not cached."""

MIN_INDEX = 10_000
"""Block hashes below which stale ones are not worth removing."""


class PrefixCache:
    """Thread-safe LRU cache. Evicts when KV caches of the process, running ones included, exceed `max_bytes`."""

    def __init__(self, max_bytes: int, max_entries: float = inf) -> None:
        self.max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        # Block hash -> key of the newest prompt with that prefix. May name evicted entries.
        self._blocks: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
        self._lock = threading.RLock()
        self.queried = self.hit = 0
        """Tokens of prompts that were looked up, and of those that were found."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
        self.make_room(0)  # after the insertion: the newest entry is evicted last

    def drop(self, key: Hashable) -> None:
        """Remove the entry if present."""
        with self._lock:
            self._entries.pop(key, None)

    def make_room(self, needed: int) -> bool:
        """Evict LRU entries until `needed` bytes are free; return True if they are.

        A request larger than the budget evicts nothing.
        """
        with self._lock:
            while self._entries and (
                len(self._entries) > self._max_entries or needed <= self.max_bytes < allocated_bytes() + needed
            ):
                self._entries.popitem(last=False)
        return allocated_bytes() + needed <= self.max_bytes

    def put_prompt(self, ids: tuple[int, ...], loops: int, state: KVCache) -> None:
        """Cache the state of a prompt: one row without padding, which must not change any more."""
        if len(ids) < BLOCK:
            return
        with self._lock:
            for block in _block_hashes(ids, loops):
                self._blocks[block] = loops, ids
            # Amortised: the index is cleaned when most of it is stale, not at each eviction.
            if len(self._blocks) > 4 * BLOCK * len(self._entries) + MIN_INDEX:
                self._blocks = {block: key for block, key in self._blocks.items() if key in self._entries}
        self.put((loops, ids), state)

    def get_prompt(self, ids: tuple[int, ...], loops: int) -> KVCache | None:
        """Return a copy of the state of the longest cached prefix of `ids`, or None."""
        with self._lock:
            self.queried += len(ids)
            match = None
            for block in _block_hashes(ids, loops):
                if (key := self._blocks.get(block)) is None or key not in self._entries:
                    break
                match = key
            if match is None:
                return None
            state: KVCache = self.get(match)
            # Within a block the prompts may still differ; only whole blocks were compared.
            both = enumerate(zip(match[1], ids, strict=False))
            length = next((i for i, (a, b) in both if a != b), min(len(match[1]), len(ids)))
            self.hit += length
            return state.crop(0, length)


def _block_hashes(ids: Sequence[int], loops: int) -> list[Hashable]:
    """Return a chained hash for each prefix of whole blocks."""
    hashes: list[Hashable] = []
    value = hash(loops)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        value = hash((value, tuple(ids[end - BLOCK : end])))
        hashes.append(value)
    return hashes
