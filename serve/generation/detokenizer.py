"""Incremental detokenization: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental text of tokens, equal in total to the text of all tokens at once.

    A character may span several byte-level tokens: it is emitted with the last one.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that the token completes, often empty."""
        self._pending.append(token)
        text = self._decode(self._pending)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """Return the pending text at the end; an incomplete character becomes U+FFFD."""
        return self._emit(self._decode(self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        self._pending.clear()
        return text


class StopScanner:
    """Cuts text before the first stop string; holds back text that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be emitted."""
        if self.stopped:
            return ""
        text = self._pending + text
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return text[: min(ends)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - length :]
        return text[: len(text) - length]

    def flush(self) -> str:
        """Return the pending text at the end."""
        text, self._pending = self._pending, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
