"""Measure vocabularies on held-out episodes: tokens per text, and names whose spelling changes within an episode.

A name in an observation is known if it occurs in the goal, an earlier observation or an action up to its own. Its
spelling is every token with a letter of it. It is split differently if its earlier places have any other spelling;
`after a blank` counts only places that follow a blank. Names are those listed, and in ALFWorld the words before a
number.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.environments import declared
from data_prep.environments.scienceworld.names import ENTITIES
from lab.data.train_tokenizer import read_names
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import STEP_MARKS, clean

EXAMPLE = "python -m lab tokenizer-eval --tokenizers loopwm/text/model/tokenizer.json --episodes data/episodes/dev-gold"

_NUMBERED = re.compile(r"\b[a-z]+(?= \d)")

Spelling = tuple[str, ...]


@dataclass(frozen=True)
class NamePlace:
    """Place of a name: the name as written, its tokens, and True if a blank precedes it."""

    name: str
    spelling: Spelling
    after_blank: bool


@dataclass
class Speller:
    """Tokenizer with a cache of spelled texts."""

    tokenizer: Tokenizer
    names: re.Pattern[str]
    known: dict[tuple[str, re.Pattern[str]], tuple[int, list[NamePlace]]] = field(default_factory=dict)

    def spell(self, text: str, numbered: bool) -> tuple[int, list[NamePlace]]:
        """Return the number of tokens of a text, and the places of names in it."""
        pattern = _NUMBERED if numbered else self.names
        if (text, pattern) not in self.known:
            encoding = self.tokenizer.encode(text)
            spans = list(zip(encoding.tokens, encoding.offsets, strict=True))
            places = [
                NamePlace(
                    match[0],
                    tuple(token for token, (start, end) in spans if start < match.end() and match.start() < end),
                    text[: match.start()].endswith(" "),
                )
                for match in pattern.finditer(text)
            ]
            self.known[text, pattern] = len(spans), places
        return self.known[text, pattern]


@dataclass
class Totals:
    """Sums over transitions: tokens by kind, known names, and those that are split differently."""

    transitions: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    known: Counter[bool] = field(default_factory=Counter)
    differing: Counter[bool] = field(default_factory=Counter)
    """Counts of all places (False) and of those after a blank (True)."""


def measure(speller: Speller, episodes: Iterable[Episode]) -> Totals:
    totals = Totals()
    for episode in episodes:
        numbered = declared(episode.env).numbered
        earlier: Mapping[tuple[str, bool], set[Spelling]] = defaultdict(set)
        for text in (episode.goal, episode.steps[0].observation):
            _remember(earlier, speller.spell(clean(text), numbered)[1])
        for step in episode.steps[1:]:
            action, action_places = speller.spell(clean(step.action or ""), numbered)
            observation, places = speller.spell(clean(step.observation), numbered)
            totals.transitions += 1
            totals.tokens.update(action=action, observation=observation)
            _remember(earlier, action_places)
            for place in places:
                for blank_only in (False, True) if place.after_blank else (False,):
                    if before := earlier[place.name, blank_only]:
                        totals.known[blank_only] += 1
                        totals.differing[blank_only] += before != {place.spelling}
            _remember(earlier, places)
    return totals


def _remember(earlier: Mapping[tuple[str, bool], set[Spelling]], places: Iterable[NamePlace]) -> None:
    for place in places:
        earlier[place.name, False].add(place.spelling)
        if place.after_blank:
            earlier[place.name, True].add(place.spelling)


def names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern of the longest listed name at each place, as whole words in any case."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE)


def render(measured: Sequence[tuple[Path, Tokenizer, Totals]]) -> str:
    heads = ("vocabulary", "entries", "observation", "action", "transition", "names split differently", "after a blank")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for path, tokenizer, totals in measured:
        means = [totals.tokens[kind] / totals.transitions for kind in ("observation", "action")]
        shares = [f"{totals.differing[blank]:,} of {totals.known[blank]:,}" for blank in (False, True)]
        sizes = [f"{mean:.2f}" for mean in (*means, sum(means) + STEP_MARKS)]
        lines.append("| " + " | ".join((str(path), str(tokenizer.get_vocab_size()), *sizes, *shares)) + " |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizers", nargs="+", type=Path, required=True, help="tokenizer files")
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--names", nargs="+", type=Path, default=[ENTITIES], help="lists of ScienceWorld's names")


def run(args: argparse.Namespace) -> None:
    names = names_pattern(read_names(args.names))
    episodes = recorded_episodes(args.episodes)
    measured = []
    for path in args.tokenizers:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise InputError(f"{path}: not a tokenizer file ({error})") from error
        totals = measure(Speller(tokenizer, names), episodes)
        if not totals.transitions:
            raise InputError("--episodes: no transitions in the given files")
        measured.append((path, tokenizer, totals))
    print(f"{measured[0][2].transitions:,} transitions\n\n{render(measured)}")
