"""Recognise observations that refuse an action, by their text."""

from __future__ import annotations

import re

_REFUSALS = (
    "no known action", "unknown action", "nothing happens", "it's not clear how", "you can't", "i'm not sure how",
    "that container is empty", "that thing doesn't appear",
)  # fmt: skip
_NOT_OPENABLE = re.compile(r"^the [^.]* is not openable")


def is_refused(observation: str) -> bool:
    """Return True if the text says that the action was not carried out, without naming a door's or device's state."""
    text = squeezed_lines(observation)
    return text.startswith(_REFUSALS) or _NOT_OPENABLE.match(text) is not None


def is_accepted(observation: str, acceptance: float | None) -> bool:
    """Return True unless the text refuses the action. acceptance: probability that it is carried out, if predicted."""
    return not is_refused(observation) and (acceptance is None or acceptance >= 0.5)


def squeezed_lines(text: str) -> str:
    """Return the text in lower case, single blanks between words, line breaks unchanged."""
    lines = (" ".join(line.split()) for line in text.strip().lower().split("\n"))
    return "\n".join(line for line in lines if line)
