"""Convert episodes to token shards for training, or check existing shards.

With `--rename`, things in that share of the episodes get other names of their kind (`data_prep.renaming`); the seed and
the episode alone decide which episodes and names.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from loopwm.records.errors import InputError
from loopwm.records.files import line_files, sha256

EXAMPLE = "python -m data_prep tokenize --episodes data/episodes/train --out data/shards/train --workers 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--episodes", nargs="+", type=Path, help="episode files or folders")
    job.add_argument("--check", action="store_true", help="check the shards in --out instead")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; None: the shipped checkpoint's")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--skip-contradictions",
        action="store_true",
        help="leave out episodes whose start contradicts another of their variation",
    )
    parser.add_argument(
        "--rename", type=float, default=0.0, metavar="SHARE", help="share of episodes whose things are renamed"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the renaming")
    parser.add_argument("--shard-tokens", type=int, default=8_000_000, help="approximate tokens of a shard")


def run(args: argparse.Namespace) -> None:
    from data_prep.tokenize import TOKENIZER_FILE, RenamingPlan, describe_renamings, tokenize_files
    from loopwm.records.shards import check_shards, write_shards

    tokenizer = args.tokenizer or TOKENIZER_FILE
    if not tokenizer.is_file():
        raise InputError(f"{tokenizer}: must be a tokenizer file, no such file")
    for name in ("workers", "shard_tokens"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: at least 1")
    if not 0 <= args.rename <= 1:
        raise InputError("--rename: must be 0 to 1")
    tokenizer_hash, outcomes = sha256(tokenizer.read_bytes()), Counter[str]()
    if args.check:
        index = check_shards(args.out, tokenizer_hash)
    else:
        files = line_files(args.episodes)
        sources = [{"name": path.name, "sha256": sha256(path.read_bytes())} for path in files]
        skipped: list[str] | None = [] if args.skip_contradictions else None
        renaming = RenamingPlan(args.rename, args.seed)
        encoded = tokenize_files(files, tokenizer, args.workers, renaming, outcomes, skipped)
        index = write_shards(args.out, encoded, args.shard_tokens, tokenizer_hash, sources, asdict(renaming))
        for line in skipped or ():
            print(f"skipped: {line}", file=sys.stderr)
    totals = ", ".join(f"{index[name]:,} {name}" for name in ("episodes", "steps", "spans", "tokens"))
    renamings = f"; {describe_renamings(outcomes)}" if args.rename else ""
    print(f"{args.out}: {len(index['shards'])} shards, {totals}{renamings}")
