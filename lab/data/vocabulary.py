"""Byte-level BPE of three lists of merges, one after the other: words, integers, and phrases without names.

words      a BPE of text cut into words, digits and marks (`WORDS`), so that each is encoded by itself
integers   0 to 100 as one token each, with and without a blank before it
phrases    a BPE whose letters are the template words and marks that the first list made whole, in runs that names,
           numbers and line breaks end: " is now connected to", ". In it, you see:"

A name is a word of the given names, or a single letter but the article; every other word is the template's. The
pre-tokenizer of the result has the same borders: it holds together only runs of the words and marks that occur in a
phrase, and isolates every other word, known or not. Consequences for a name:

- It shares no token with anything but the blank before it, in any surroundings.
- After a blank it has one encoding, in lists, actions and answers alike. Without one (first in a line, after a bracket
  or a hyphen) it has one as well, which may be another.

Numbers: a run of digits is an integer if it is 0 to 100 and without a leading zero; all others are encoded digit by
digit. A sign and a point are no digits: -12 is "-" "12", 0.05 is "0" "." "0" "5". The minus sign is in no phrase.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer

from loopwm.records.template import SPECIAL_TOKENS

Merge = tuple[str, str]
PhraseMerge = tuple[tuple[str, ...], tuple[str, ...]]
"""Two phrases, each as its pieces, that become one."""

_BREAKS = r"\n\t?|\t"
_APART = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?= \S)|\s+"  # the last of several blanks belongs to the next token
_INTEGER = r" ?(?<!\p{N})(?:100|[1-9]?[0-9])(?!\p{N})"
WORDS = f"{_BREAKS}|{_APART}"
"""First cut: line breaks with their indent, words, single digits and runs of marks."""

MARKS = frozenset(string.punctuation) - {"-"}
"""Marks that a phrase may hold beside words: the minus sign belongs to the number after it."""

_BLANK = "Ġ"
"""Blank in byte-level vocabularies."""

_FIRST_LETTER = 0xF0000
"""First private character: phrases are learnt on texts of one such character a word."""


def word_tokenizer(texts: Iterable[str], entries: int) -> Tokenizer:
    """Train a BPE of at most `entries` entries, `SPECIAL_TOKENS` first, whose merges stay within a word."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(WORDS)
    trainer = BpeTrainer(
        vocab_size=entries,
        min_frequency=2,
        special_tokens=_special_tokens(),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _special_tokens() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]


def _pre_tokenizer(pattern: str) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def name_words(names: Iterable[str]) -> frozenset[str]:
    """Return the words of some names, in lower case. Single letters are names without being listed."""
    return frozenset(word for name in names for word in re.findall(r"[^\W\d_]{2,}", name.lower()))


def is_name(word: str, names: frozenset[str]) -> bool:
    return word.lower() in names or (len(word) == 1 and word not in "Aa")


def template_runs(
    lines: Iterable[tuple[str, int]], words: Tokenizer, names: frozenset[str]
) -> Counter[tuple[str, ...]]:
    """Return the runs of at least two template pieces in some lines, weighted by the lines' counts.

    A piece is a word or a run of `MARKS`, with the blank before it, that is one token of `words`.
    """
    vocabulary = words.get_vocab()
    cut = Split(Regex(WORDS), "isolated")
    known: dict[str, bool] = {}
    runs: Counter[tuple[str, ...]] = Counter()
    for line, count in lines:
        pieces = [piece for piece, _ in cut.pre_tokenize_str(line)]
        for piece in pieces:
            if piece not in known:
                known[piece] = _spelled(piece) in vocabulary and _is_template(piece.removeprefix(" "), names)
        for template, run in groupby(pieces, known.__getitem__):
            if template and len(key := tuple(run)) > 1:
                runs[key] += count
    return runs


def _is_template(piece: str, names: frozenset[str]) -> bool:
    if piece.isascii() and piece.isalpha():
        return not is_name(piece, names)
    return bool(piece) and MARKS.issuperset(piece)


def _spelled(piece: str) -> str:
    """Return an ASCII piece in the letters of a byte-level vocabulary."""
    return piece.replace(" ", _BLANK)


def phrase_merges(runs: Mapping[tuple[str, ...], int], limit: int) -> list[PhraseMerge]:
    """Learn at most `limit` merges of pieces, in order, from weighted runs. Pairs that occur once are not merged."""
    pieces = sorted(set(chain.from_iterable(runs)))
    letters = {piece: chr(_FIRST_LETTER + i) for i, piece in enumerate(pieces)}
    bpe = Tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=len(pieces) + limit,
        min_frequency=2,
        initial_alphabet=list(letters.values()),
        show_progress=False,
    )
    texts = ("".join(letters[piece] for piece in run) for run, count in sorted(runs.items()) for _ in range(count))
    bpe.train_from_iterator(texts, trainer)

    def pieces_of(text: str) -> tuple[str, ...]:
        return tuple(pieces[ord(letter) - _FIRST_LETTER] for letter in text)

    return [(pieces_of(left), pieces_of(right)) for left, right in _model(bpe)["merges"]]


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def integer_merges() -> list[Merge]:
    """Return merges of digits, then of blanks: in this order " 12" becomes "12" before it takes the blank."""
    digits = [(str(n)[:-1], str(n)[-1]) for n in range(10, 101)]
    return digits + [(_BLANK, str(n)) for n in range(101)]


def whole_tokenizer(words: Tokenizer, phrases: Iterable[PhraseMerge]) -> Tokenizer:
    """Return the entries of `words`, then the integers, then the phrases."""
    model = _model(words)
    vocabulary: dict[str, int] = model["vocab"]
    merges: list[Merge] = [(left, right) for left, right in model["merges"]]
    learnt = list(phrases)
    spelled = [(_spelled("".join(left)), _spelled("".join(right))) for left, right in learnt]
    for left, right in integer_merges() + spelled:
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pattern(piece for left, right in learnt for piece in left + right))
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(_special_tokens())
    return tokenizer


def pattern(pieces: Iterable[str]) -> str:
    """Return the final cut: runs of the given pieces, with or without a blank, stay together; integers are isolated."""
    bare = {piece.removeprefix(" ") for piece in pieces}
    words, marks = (sorted(piece for piece in bare if piece.isalpha() is kind) for kind in (True, False))
    together = [rf" ?(?:{'|'.join(_by_first_letter(words))})(?!\p{{L}})"] if words else []
    together += [f" ?(?:{'|'.join(map(re.escape, marks))})"] if marks else []
    runs = [f"(?:{'|'.join(together)})+"] if together else []
    return "|".join([_BREAKS, *runs, _INTEGER, _APART])


def _by_first_letter(words: Iterable[str]) -> Iterator[str]:
    """Yield alternatives that share a first letter as one, which makes the cut three times faster."""
    for letter, group in groupby(words, key=lambda word: word[0]):
        yield f"{letter}(?:{'|'.join(word[1:] for word in group)})"
