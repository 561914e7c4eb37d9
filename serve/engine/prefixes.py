"""Keys and values of prompts that were run before, for prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loopwm.core import CoreState

BLOCK = 16
"""Prompts share prefixes of whole blocks, so that many find the same one; shorter ones are not worth a pass."""


class PrefixCache:
    """The least recently used goes first when more than `most_bytes` are kept. Owned by one thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[tuple[tuple[int, ...], int], _Entry] = OrderedDict()

    def find(self, prompt: tuple[int, ...], limit: int) -> CoreState | None:
        """The state, one row, of the longest known beginning of a prompt that was run with `limit` loops.

        At least one token of the prompt is left over. Two prompts with the same beginning get the same object.
        """
        known = [(_common(tokens, prompt[:-1]), (tokens, loops)) for tokens, loops in self._entries if loops == limit]
        length, key = max(known, default=(0, None))
        if key is None or length < BLOCK:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].first(length)

    def put(self, tokens: tuple[int, ...], limit: int, state: CoreState) -> None:
        """Keeps the state of these tokens, one row without padding, which must not change any more.

        The newest is kept whatever its size.
        """
        self._entries[tokens, limit] = _Entry(state)
        while len(self._entries) > 1 and self.nbytes() > self._most:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()

    def nbytes(self) -> int:
        return sum(entry.state.nbytes() for entry in self._entries.values())


class _Entry:
    def __init__(self, state: CoreState) -> None:
        self.state = state
        self._cropped: dict[int, CoreState] = {}

    def first(self, length: int) -> CoreState:
        if length not in self._cropped:
            self._cropped[length] = self.state.crop(self.state.length - length)
        return self._cropped[length]


def shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length, in whole blocks, of what several prompts begin with. Each keeps its last token for itself."""
    if len(prompts) < 2:
        return 0
    shortest = min(prompts, key=len)
    return min(_common(shortest[:-1], prompt) for prompt in prompts)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning in whole blocks."""
    length = 0
    while length + BLOCK <= min(len(a), len(b)) and a[length : length + BLOCK] == b[length : length + BLOCK]:
        length += BLOCK
    return length
