"""Which parts of texts need that something was seen, and which texts show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from data_prep.environments import declared
from data_prep.environments.alfworld.facts import contents_facts
from data_prep.environments.base import TextFacts
from data_prep.environments.scienceworld.facts import listing_facts
from data_prep.tokenize import TOKENIZER_FILE, LineEncoder, encode_episode
from loopwm.records.episodes import Episode, Step

KITCHEN = (
    "This room is called the kitchen. In it, you see: \n\tthe agent\n\ta substance called air\n"
    "\ta counter. On the counter is: a bowl (containing a red apple), a drawer.\n"
    "\ta cupboard. The cupboard door is {door}\n"
    "\ta thermometer, currently reading a temperature of 10 degrees celsius\n"
    "You also see:\n\tA door to the hallway (that is open)\n\tA door to the outside (that is closed)"
)
CLOSED = KITCHEN.format(door="closed. ")
OPEN = KITCHEN.format(door="open. In the cupboard is: a tin cup (containing nothing), soap.")
HALLWAY = (
    "This room is called the hallway. In it, you see: \n\tthe agent\n\ta substance called air\n\ta metal pot\n"
    "You also see:\n\tA door to the kitchen (that is open)"
)


def marked(
    texts: Sequence[str], last: int, facts: Callable[[Sequence[str]], list[TextFacts]], seen: Sequence[int]
) -> str:
    """Return texts[last] with what the texts `seen` leave undetermined in brackets."""
    found = facts(list(dict.fromkeys(texts)))
    of = dict(zip(dict.fromkeys(texts), found, strict=True))
    known = frozenset().union(*(of[texts[i]].shows for i in seen))
    text = texts[last]
    for need in reversed(of[text].needs):
        if not need.facts & known:
            text = f"{text[: need.start]}[{text[need.start : need.end]}]{text[need.end :]}"
    return text.replace("][", "")


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("You arrive at desk 1. On the desk 1, you see [a pen 2, and a pen 1.]", {"desk 1"}),
        ("You open the safe 1. The safe 1 is open. In it, you see [nothing.]", {"safe 1"}),
        ("This is a normal box 1. In it, you see [a key 1.]", {"box 1"}),
        ("You arrive at safe 1. The safe 1 is closed.", set()),
        ("You are facing the safe 1. Next to it, you see nothing.\nOn the desk 2, you see [a pen 1.]", {"desk 2"}),
        ("You are in the middle of a room. Looking quickly around you, you see a bed 1, and a desk 1.", set()),
        ("You pick up the pen 1 from the desk 1.", set()),
    ],
)
def test_contents_facts_of_a_text_are_the_places_it_lists(text: str, places: set[str]) -> None:
    plain = text.replace("[", "").replace("]", "")
    assert marked([plain], 0, contents_facts, []) == text
    assert marked([plain], 0, contents_facts, [0]) == plain
    assert contents_facts([plain])[0].shows == places


def test_listing_facts_first_look_is_undetermined() -> None:
    text = marked([HALLWAY, CLOSED], 1, listing_facts, [0])
    start, rest = text.split("[", 1)
    assert start.endswith("\n\tthe agent\n\ta substance called air")
    assert rest == (
        "\n\ta counter. On the counter is: a bowl (containing a red apple), a drawer.\n"
        "\ta cupboard. The cupboard door is closed. \n"
        "\ta thermometer, currently reading a temperature of 10 degrees celsius\n]"
        "You also see:[\n\t]A door to the hallway (that is open)[\n\tA door to the outside (that is closed)]"
    )


def test_listing_facts_second_look_needs_what_was_opened() -> None:
    text = marked([CLOSED, OPEN], 1, listing_facts, [0])
    assert text == OPEN.replace("a tin cup (containing nothing), soap.", "[a tin cup (containing nothing), soap.]")
    inside = "Inside the cupboard is: \n\ta tin cup (containing nothing)\n\tsoap"
    assert marked([CLOSED, OPEN, inside], 1, listing_facts, [0, 2]) == OPEN


def test_listing_facts_of_a_named_thing_are_its_name() -> None:
    moved, taken = "You move the metal pot to the inventory.", "In your inventory, you see:\n\ta metal pot"
    for named in (moved, taken, "pick up metal pot"):
        assert "[\n\t]a metal pot[\n]" in marked([CLOSED, named, HALLWAY], 2, listing_facts, [0, 1])
    assert "[\n\ta metal pot\n]" in marked([CLOSED, moved, HALLWAY], 2, listing_facts, [0])


@pytest.mark.parametrize(
    "text", ["go to hallway", "You move to the hallway.", "You move through the door to the hallway."]
)
def test_listing_facts_of_a_door_gone_through_are_known(text: str) -> None:
    assert "]A door to the hallway (that is open)[" in marked([text, CLOSED], 1, listing_facts, [0])
    assert "\n\tA door to the hallway (that is open)\n" in marked([text, CLOSED], 1, listing_facts, [])


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("Inside the jug is: \n\ta substance called water", "Inside the jug is: [\n\ta substance called water]"),
        ("a metal pot (containing soap)", "a metal pot (containing [soap)]"),
        (taken := "In your inventory, you see:\n\tan orange", taken),
        (moved := "You move the orange to the metal pot.", moved),
        (which := "Ambiguous request: 0:\tmove cup (in bowl) to pot (containing soap)", which),
    ],
)
def test_listing_facts_of_other_texts_are_contents(text: str, needs: str) -> None:
    assert marked([text], 0, listing_facts, []) == needs


def test_facts_of_an_unknown_environment_are_empty() -> None:
    assert declared("toy").facts(["On the desk 1, you see a pen 1."]) == [TextFacts()]


def test_encoded_facts_cover_the_tokens_of_the_needs(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [
        "You arrive at desk 1. On the desk 1, you see a pen 1.",
        "You open the safe 1. The safe 1 is open. In it, you see nothing.",
        "You arrive at desk 1. On the desk 1, you see nothing.",
    ]
    steps = [Step(None, "You are in a room.", 0, False)]
    steps += [Step(f"go to {i}", text, 0, False, look=texts[0]) for i, text in enumerate(texts)]
    episode = Episode("alfworld", "pick", "g", "train", "gold", "", tuple(steps))
    encoded = encode_episode(LineEncoder(Tokenizer.from_file(str(TOKENIZER_FILE))), episode)
    rows = encoded.facts.tolist()
    assert rows == sorted(rows)
    shown = {start: fact for start, length, fact in rows if length == 0}
    needs = [(tokenizer.decode(encoded.tokens[a : a + n].tolist()), fact) for a, n, fact in rows if n]
    assert len(shown) == 3
    # The last token of a template may hold the first of a list.
    assert needs == [(", you see a pen 1.", 0), (" is open. In it, you see nothing.", 1), (", you see nothing.", 0)]
    assert np.all(np.isin(list(shown), encoded.spans["start"]))
