"""A prediction against the true observation, word by word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

Kind = Literal["same", "missing", "added"]
_PIECES = re.compile(r"^\s+|\w+\s*|[^\w\s]\s*")


@dataclass(frozen=True)
class Span:
    """A stretch of text: in both, in the true observation alone, or in the prediction alone."""

    kind: Kind
    text: str


def word_diff(reference: str, prediction: str) -> list[Span]:
    """`same` and `missing` joined are the reference, `same` and `added` the prediction."""
    a, b = _PIECES.findall(reference), _PIECES.findall(prediction)
    spans: list[Span] = []
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            spans.append(Span("same", "".join(a[a0:a1])))
            continue
        if a1 > a0:
            spans.append(Span("missing", "".join(a[a0:a1])))
        if b1 > b0:
            spans.append(Span("added", "".join(b[b0:b1])))
    return spans
