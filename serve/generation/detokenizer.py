"""From token ids to text while they come: whole characters only, and the end at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text piece by piece. The pieces joined are the text of all tokens at once.

    A character may be spread over several byte-level tokens: its piece comes with its last token.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text this token completes, often empty."""
        self._pending.append(token)
        text = self._decode(self._pending)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """What is left when no more tokens come; a character cut in the middle becomes U+FFFD."""
        return self._emit(self._decode(self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        self._pending.clear()
        return text


class StopScanner:
    """Cuts a text before the first stop string. Text that may still become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to be shown."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
