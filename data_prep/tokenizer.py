"""Trains the byte-level BPE of the text worlds and freezes it.

Text is split before merging so that each digit, and each line break with its indent, stands alone; readings and
tables are then spelled the same way wherever they appear. Every byte is in the alphabet, so any text round-trips.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from data_prep.alfworld_texts import train_texts
from data_prep.episodes import Episode, episode_files, read_episodes
from data_prep.errors import DataError
from data_prep.files import atomic_write
from loopwm.text.format import SPECIAL_TOKENS, clean

PATTERN = r"\n\t?|\t| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
COMPARED_SIZES = (1792, 2048, 3072)
KINDS = ("goal", "observation", "look", "inventory", "action")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with `vocab_size` entries, `SPECIAL_TOKENS` first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def count_texts(episodes: Iterable[Episode]) -> dict[str, Counter[str]]:
    """How often each text of a kind occurs. Raises DataError for an episode that is not of the train split."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for episode in episodes:
        if episode.split != "train":
            raise DataError(f"split: {episode.split!r} episode of {episode.task}; the tokenizer sees train text only")
        counts["goal"][clean(episode.goal)] += 1
        for step in episode.steps:
            for kind in KINDS[1:]:
                if (text := getattr(step, kind)) is not None:
                    counts[kind][clean(text)] += 1
    return counts


def training_texts(counts: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Each distinct text, repeated by the root of its count: frequent texts matter more but do not rule."""
    for counter in counts.values():
        for text, count in sorted(counter.items()):
            yield from [text] * math.isqrt(count)


def tokens_per_text(tokenizer: Tokenizer, counts: Mapping[str, Counter[str]]) -> dict[str, float]:
    """Mean tokens a text of each kind, over occurrences."""
    means = {}
    for kind, counter in counts.items():
        texts = list(counter)
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts)]
        means[kind] = sum(n * counter[t] for n, t in zip(lengths, texts, strict=True)) / max(1, counter.total())
    return means


def size_table(texts: list[str], counts: Mapping[str, Counter[str]], sizes: Iterable[int]) -> str:
    """A Markdown table of mean tokens a text for several vocabulary sizes."""
    lines = ["| entries | " + " | ".join(counts) + " |", "|---" * (len(counts) + 1) + "|"]
    for size in sizes:
        tokenizer = train_tokenizer(texts, size)
        means = tokens_per_text(tokenizer, counts)
        lines.append(f"| {tokenizer.get_vocab_size()} | " + " | ".join(f"{means[k]:.2f}" for k in counts) + " |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders, train split")
    parser.add_argument("--alfworld-games", type=Path, required=True, help="folder or archive in ALFWorld's layout")
    parser.add_argument("--vocab-size", type=int, default=2048, help="entries, special tokens included")
    parser.add_argument("--compare", action="store_true", help=f"only print tokens a text at {COMPARED_SIZES}")
    parser.add_argument("--out", type=Path, default=Path("loopwm/text/tokenizer.json"))
    parser.add_argument("--force", action="store_true", help="overwrite; shards and checkpoints made before are void")


def run(args: argparse.Namespace) -> None:
    if args.out.exists() and not args.force and not args.compare:
        raise DataError(f"{args.out}: exists and is frozen; --force replaces it, and voids shards and checkpoints")
    if args.vocab_size < 256 + len(SPECIAL_TOKENS):
        raise DataError(f"--vocab-size: at least {256 + len(SPECIAL_TOKENS)} (every byte and the special tokens)")
    episodes = (episode for path in episode_files(args.episodes) for episode in read_episodes(path))
    counts = count_texts(episodes)
    counts["alfworld"] = Counter(map(clean, train_texts(args.alfworld_games)))
    texts = list(training_texts(counts))
    if args.compare:
        print(size_table(texts, counts, COMPARED_SIZES))
        return
    tokenizer = train_tokenizer(texts, args.vocab_size)
    with atomic_write(args.out) as file:
        file.write(tokenizer.to_str(pretty=False).encode() + b"\n")
    means = tokens_per_text(tokenizer, counts)
    summary = ", ".join(f"{kind} {mean:.2f}" for kind, mean in means.items())
    print(f"{args.out}: {tokenizer.get_vocab_size()} entries; mean tokens a text: {summary}")
