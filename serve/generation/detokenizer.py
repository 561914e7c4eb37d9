"""Incremental detokenization: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental text of tokens, cut before the first stop string.

    A character may span several byte-level tokens: it is emitted with the last one. Text that may become a stop string
    is held back.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Start a text. min_tokens: tokens after which stop strings count."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._tokens: list[int] = []  # of a character that is not complete
        self._held = ""
        self.length = 0
        """Characters of all complete text, emitted or not."""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that can be emitted after the token, often empty."""
        self._num_tokens += 1
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT):
            return ""
        text = self._complete(text)
        return self._scan(text) if self._num_tokens > self._min_tokens else text

    def flush(self) -> str:
        """Return the rest at the end; an incomplete character becomes U+FFFD."""
        text = self._scan(self._complete(self._decode(self._tokens) if self._tokens else ""))
        held, self._held = self._held, ""
        return text + held

    def _complete(self, text: str) -> str:
        self._tokens.clear()
        self.length += len(text)
        return text

    def _scan(self, text: str) -> str:
        """Return the text to emit, and hold back the rest."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
