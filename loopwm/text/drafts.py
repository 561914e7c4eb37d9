"""Drafts of text to decode: what followed the newest tokens where they were seen before (prompt lookup).

Observations repeat: a room is listed again with a few changes. A draft is verified in one pass in place of one pass a
token, and only what would have been chosen without it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

MATCHES = (16, 8, 4, 3)
"""Numbers of newest tokens that are looked for, the most first."""

MOST_DRAFTED = 64
"""Drafted tokens of a pass, shared by its rows: about as many as take no longer than one row by itself."""

MOST_SHARED = 200_000
"""Tokens of shared text, about 50 µs to search."""


class SharedText:
    """Texts that worlds beside each other decoded, the newest."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        self.text = (self.text + text)[-MOST_SHARED:]


class Lookup:
    """Text of a world: what it has seen and imagined. Drafts are of this, and of what worlds beside it decoded."""

    def __init__(self, shared: SharedText, text: str) -> None:
        self._own, self._shared = text, shared

    def extend(self, tokens: Iterable[int]) -> None:
        self._own += as_text(tokens)

    def share(self, count: int) -> None:
        """Show the newest `count` tokens, and those that a draft of them may be found by, to the worlds beside."""
        self._shared.add(self._own[-count - MATCHES[0] :])

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest equal text, own text first, where it is newest."""
        if most < 1:
            return []
        for length in MATCHES:
            newest = self._own[-length:]
            for text in (self._own, self._shared.text):
                place = text.rfind(newest, 0, len(text) - 1) + length  # something must follow
                if place >= length:
                    return [ord(token) for token in text[place : place + most]]
        return []


def as_text(tokens: Iterable[int]) -> str:
    """Write each token as a character: finding a substring is fast."""
    return "".join(map(chr, tokens))
