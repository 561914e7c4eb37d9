"""Convert episodes to token shards for training, or check existing shards."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loopwm.records.errors import InputError
from loopwm.records.files import line_files, sha256

if TYPE_CHECKING:
    from data_prep.tokenize import Rewrite

EXAMPLE = "python -m data_prep tokenize --episodes data/episodes/train --out data/shards/train --workers 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--episodes", nargs="+", type=Path, help="episode files or folders")
    job.add_argument("--check", action="store_true", help="check the shards in --out instead")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; None: the shipped checkpoint's")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--shard-tokens", type=int, default=8_000_000, help="approximate tokens of a shard")


def run(args: argparse.Namespace) -> None:
    from data_prep.tokenize import keep

    convert(args, keep, {})


def convert(
    args: argparse.Namespace, rewrite: Rewrite, renaming: Mapping[str, float], skipped: list[str] | None = None
) -> Counter[str]:
    """Write or check shards, print totals, and return how often `rewrite` had each outcome.

    renaming: what the index records of the rewrite. skipped: as in `data_prep.tokenize.consistent_episodes`.
    """
    from data_prep.tokenize import TOKENIZER_FILE, tokenize_files
    from loopwm.records.shards import check_shards, write_shards

    tokenizer = args.tokenizer or TOKENIZER_FILE
    if not tokenizer.is_file():
        raise InputError(f"{tokenizer}: must be a tokenizer file, no such file")
    for name in ("workers", "shard_tokens"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: at least 1")
    tokenizer_hash, outcomes = sha256(tokenizer.read_bytes()), Counter[str]()
    if args.check:
        index = check_shards(args.out, tokenizer_hash)
    else:
        files = line_files(args.episodes)
        sources = [{"name": path.name, "sha256": sha256(path.read_bytes())} for path in files]
        encoded = tokenize_files(files, tokenizer, args.workers, rewrite, outcomes, skipped)
        index = write_shards(args.out, encoded, args.shard_tokens, tokenizer_hash, sources, renaming)
    totals = ", ".join(f"{index[name]:,} {name}" for name in ("episodes", "steps", "spans", "tokens"))
    print(f"{args.out}: {len(index['shards'])} shards, {totals}")
    return outcomes
