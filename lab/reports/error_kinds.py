"""Classify wrong predictions by a written rule. See `error_kind`."""

from __future__ import annotations

import re
from typing import Literal

from eval.scores.metrics import names_of, normalize
from loopwm.records.refusals import is_refused, squeezed_lines

ErrorKind = Literal["refusal", "reading", "state", "repetition", "name", "list", "other"]
ERROR_KINDS: tuple[ErrorKind, ...] = ("refusal", "reading", "state", "repetition", "name", "list", "other")

_AMBIGUITY = "ambiguous request"

_READING = re.compile(
    r"(?:approximately )?-?\d+(?:\.\d+)?(?:% (?:up|down)| degrees| ticks?)|at the (?:top|bottom) of(?= the plane)"
)
_OPENNESS = re.compile(
    r"(?:(?:is(?: now| already| not)?|isn't) (?:open|closed)\b(?:, so you can't see inside)?|you (?:open|close)\b)"
    r"(?:\.(?: in (?:it|the [^:.]*),? (?:you see|is):? [^\n]*)?)?"
)
_DEVICE = re.compile(
    r"is (?:now |already )?(?:activated|deactivated)\b|appears broken, and can't be activated or deactivated"
    r"|(?:which is|turned) (?:on|off|activated|deactivated)\b|you turn (?:on|off)\b"
)
_STATE_WORDS = re.compile(r"\b(?:open|closed?|isn't|already|not|activated|deactivated|turned|off|turn on|broken)\b")
_ARTICLE = re.compile(r"\b(?:an?|the|some)\b ?")
_PHASE = re.compile(r"\b(?:(?:solid|liquid|gaseous)|substance called) ")
_PLACE = re.compile(r"this (?:room|outside location) is called ([^.]*)\. (?:in it,|here) you see")
_LISTING = re.compile(r"you see|\bis:|\bwith:|containing|carrying|reads:|needs? to|\n0:")
_NAME_RUN = re.compile(r"@(?: -?\d+\b)?(?:(?: and)? @(?: -?\d+\b)?)*")
_NAME_WORDS = "red|orange|yellow|green|blue|violet|purple|brown|black|white|pea|seed|jar|plant|tree|flower"
"""Words of names that the list of names holds only in part."""
LOOP = 4
"""Consecutive repeats of a text's last words that count as a loop."""
LONGEST_LOOP = 40
"""Most words of a loop."""


def error_kind(env: str, prediction: str, reference: str, last: str) -> ErrorKind:
    """Return the kind of a wrong prediction: the first of these that holds. Case and white space are ignored.

    refusal     exactly one of both refuses the action or asks which of several was meant, or they do so differently.
    reading     equal but for readings: degrees, ticks, how far down a plane.
    state       another state of a door or device (open, closed, activated, turned on, broken), also as the reason why
                an action had no effect ("is already open"), and equal but for readings, such states, and what an open
                thing therefore shows.
    repetition  repeats the last observation of the history, or ends by repeating the same words.
    name        equal but for names of things (`entities.py`), and readings and states with them: another thing.
                Where names are not known, this kind is part of `other`.
    list        both enumerate what is in one place, on a thing, carried or asked, and beginning alike (names apart)
                enumerate something else: things are missing, added, or differ in more than their names.
    other       an answer of another kind, also the same thing in another state of matter.

    So a prediction that is wrong in several ways is of the coarsest: a wrong reading of the wrong thing is `name`.
    `last`: the last observation of the history.
    """
    said, true = squeezed_lines(prediction), squeezed_lines(reference)
    if _answer(said) != _answer(true):
        return "refusal"
    said, true = _READING.sub("#", said), _READING.sub("#", true)
    if said == true:
        return "reading"
    states = _STATE_WORDS.findall(said) != _STATE_WORDS.findall(true)
    said, true = (_DEVICE.sub("%", _OPENNESS.sub("#", text)) for text in (said, true))
    if states and said == true:
        return "state"
    if normalize(prediction) == normalize(last) or (_loops(said) and not _loops(true)):
        return "repetition"
    said, true = (_ARTICLE.sub("", _PLACE.sub(r"\1. you see", text)) for text in (said, true))
    if _PHASE.sub("", said) == _PHASE.sub("", true):
        return "other"
    said, true = (_without_names(env, text) for text in (said, true))
    if said == true:
        return "name"
    return "list" if _head(said) == _head(true) is not None else "other"


def _answer(squeezed: str) -> str:
    """Return refusals by their text, the two other kinds of answer by a name."""
    if squeezed.startswith(_AMBIGUITY):
        return "ambiguity"
    return squeezed if is_refused(squeezed) else "answer"


def _loops(text: str) -> bool:
    """Return True if the text ends in a loop of at most `LONGEST_LOOP` words, perhaps cut within its last round."""
    words = text.split()
    return any(
        words[-LOOP * n : -n] == words[-(LOOP - 1) * n :] for n in range(1, min(LONGEST_LOOP, len(words) // LOOP) + 1)
    )


def _without_names(env: str, text: str) -> str:
    """Replace names by `@`, with their states of matter and numbers; several in a row by one."""
    names = names_of(env)
    longest_first = sorted(names.named(text), key=len, reverse=True) if names else []
    pattern = "|".join([*map(re.escape, longest_first), _NAME_WORDS])
    masked = re.sub(rf"\b(?:unknown )?(?:{pattern})\b", "@", _PHASE.sub("", text)) if names else text
    return _NAME_RUN.sub("@", masked)


def _head(text: str) -> str | None:
    """Return the text before the first enumerated thing; None without an enumeration."""
    match = _LISTING.search(text)
    return None if match is None else text[: match.end()]
