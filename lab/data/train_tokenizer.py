"""Train the vocabulary of the text worlds on train episodes and games, and freeze it.

It is one byte-level BPE: words, integers and phrases without names (`lab.data.vocabulary`). Every byte is in the
alphabet, so any text round-trips. The names of ScienceWorld are the list that `python -m lab build-entities` makes of
the simulator's jar; those of ALFWorld are the words before a number in its games and episodes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.environments import declared
from data_prep.environments.scienceworld.names import ENTITIES
from lab.data.alfworld_texts import GAME, NOTE, train_texts
from lab.data.vocabulary import (
    integer_merges,
    name_words,
    phrase_merges,
    template_runs,
    whole_tokenizer,
    word_tokenizer,
)  # fmt: skip
from loopwm.records.episodes import TRAIN_SPLITS, Episode, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write, line_files, open_text
from loopwm.records.template import SPECIAL_TOKENS, clean

EXAMPLE = "python -m lab train-tokenizer --episodes data/episodes/train --alfworld-games data/alfworld"

COMPARED_PHRASES = (0, 448, 896, 1792)
KINDS = ("goal", "observation", "look", "inventory", "hidden_state", "action")

_LINE = re.compile(r"[^\n]*\n\s*?(?= ?\S)|[^\n]+")
"""A line with its break and indents, but without the blank before the next word: no token crosses its end."""

_NUMBERED = re.compile(r"\b([a-z]+) \d")


@dataclass
class TrainText:
    """Text to train a vocabulary on: how often each line occurs in each kind of text.

    texts: number of texts of a kind. things: the kinds of thing that ALFWorld numbers.
    """

    lines: dict[str, Counter[str]] = field(default_factory=dict)
    texts: Counter[str] = field(default_factory=Counter)
    things: set[str] = field(default_factory=set)

    def add(self, kind: str, text: str) -> None:
        self.lines.setdefault(kind, Counter()).update(_LINE.findall(clean(text)))
        self.texts[kind] += 1

    def add_episode(self, episode: Episode) -> None:
        """Add an episode. Raises InputError for one outside the train split."""
        if episode.split not in TRAIN_SPLITS:
            raise InputError(f"split: must be train, got {episode.split!r} in {episode.task}")
        self.add("goal", episode.goal)
        for i, step in enumerate(episode.steps):
            shown = {kind: getattr(step, kind) for kind in KINDS[1:]} | {"hidden_state": episode.hidden_state_at(i)}
            for kind, text in shown.items():
                if text is not None:
                    self.add(kind, text)
            if declared(episode.env).numbered:
                self.things.update(_NUMBERED.findall(step.observation))

    def add_games(self, path: Path) -> None:
        for kind, text in train_texts(path):
            self.add(kind, text)
            if kind == GAME:
                self.things.update(_NUMBERED.findall(text))

    def weighted(self, kinds: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield each distinct line with the root of its count: frequent lines matter more but do not dominate."""
        for kind in kinds:
            for line, count in sorted(self.lines[kind].items()):
                yield line, math.isqrt(count)

    def tokens_per_text(self, tokenizer: Tokenizer) -> dict[str, float]:
        """Return mean tokens a text of each kind, over occurrences."""
        means = {}
        for kind, counter in self.lines.items():
            lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(counter))]
            tokens = sum(n * count for n, count in zip(lengths, counter.values(), strict=True))
            means[kind] = tokens / self.texts[kind]
        return means


def train_words(text: TrainText, entries: int) -> Tokenizer:
    return word_tokenizer((line for line, count in text.weighted(text.lines) for _ in range(count)), entries)


def add_phrases(text: TrainText, words: Tokenizer, names: frozenset[str], phrases: int) -> Tokenizer:
    """Return `words` with the integers and up to `phrases` phrases.

    Phrases are learnt from texts of the worlds, not from people's descriptions.
    """
    runs = template_runs(text.weighted(kind for kind in text.lines if kind != NOTE), words, names)
    return whole_tokenizer(words, phrase_merges(runs, phrases))


def read_names(paths: Iterable[Path]) -> list[str]:
    """Read names, one a line. Raises InputError for an unreadable file."""
    names: list[str] = []
    for path in paths:
        with open_text(path) as file:
            names += file.read().splitlines()
    return names


def size_table(tokenizers: Iterable[Tokenizer], text: TrainText) -> str:
    """Return a Markdown table of mean tokens a text for several vocabularies."""
    lines = ["| entries | " + " | ".join(text.lines) + " |", "|---" * (len(text.lines) + 1) + "|"]
    for tokenizer in tokenizers:
        means = text.tokens_per_text(tokenizer)
        lines.append(f"| {tokenizer.get_vocab_size()} | " + " | ".join(f"{mean:.2f}" for mean in means.values()) + " |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders, train split")
    parser.add_argument("--alfworld-games", type=Path, required=True, help="folder or archive in ALFWorld's layout")
    parser.add_argument("--names", nargs="+", type=Path, default=[ENTITIES], help="lists of ScienceWorld's names")
    parser.add_argument("--word-entries", type=int, default=2048, help="entries below the integers and phrases")
    parser.add_argument("--vocab-size", type=int, default=3136, help="entries, special tokens included")
    parser.add_argument(
        "--compare", action="store_true", help=f"only print tokens a text with {COMPARED_PHRASES} phrases"
    )
    parser.add_argument("--out", type=Path, default=Path("loopwm/text/model/tokenizer.json"))
    parser.add_argument(
        "--force", action="store_true", help="overwrite, which invalidates existing shards and checkpoints"
    )


def run(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.force and not args.compare:
        raise InputError(f"{args.out}: must be new, since shards and checkpoints depend on it; --force replaces it")
    if args.word_entries < 256 + len(SPECIAL_TOKENS):
        raise InputError(
            f"--word-entries: must be at least {256 + len(SPECIAL_TOKENS)} (every byte and the special tokens)"
        )
    phrases = args.vocab_size - args.word_entries - len(integer_merges())
    if phrases < 0:
        raise InputError(
            f"--vocab-size: must be at least {args.vocab_size - phrases} (--word-entries and the integers)"
        )
    listed = read_names(args.names)
    text = TrainText()
    text.add_games(args.alfworld_games)
    for path in line_files(args.episodes):
        for episode in read_episodes(path):
            text.add_episode(episode)
    names = name_words([*listed, *text.things])
    words = train_words(text, args.word_entries)
    if args.compare:
        print(size_table((add_phrases(text, words, names, count) for count in COMPARED_PHRASES), text))
        return
    tokenizer = add_phrases(text, words, names, phrases)
    with atomic_write(args.out) as file:
        file.write(tokenizer.to_str(pretty=False).encode() + b"\n")
    summary = ", ".join(f"{kind} {mean:.2f}" for kind, mean in text.tokens_per_text(tokenizer).items())
    print(f"{args.out}: {tokenizer.get_vocab_size()} entries; mean tokens a text: {summary}")
