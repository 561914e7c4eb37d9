"""Prepare logs for fine-tuning: import, split by goal or seed, tokenize, and cut windows.

This is the first step of `loopwm train LOGS`. --out receives episodes, shards of the train and dev splits, windows of
dev and test for `loopwm eval run`, and data.json with sizes and the contexts that the logs can show. Prepared logs are
not prepared again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.import_logs import SPLITS, add_log_arguments, group_of, import_logs, read_shares
from data_prep.tokenize import TOKENIZER_FILE, LineEncoder, encode_episode
from data_prep.windows import cut_any, write_cuts
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, read_json, sha256, write_json
from loopwm.records.shards import write_shards
from loopwm.records.template import CONTEXT_KINDS

EXAMPLE = "python -m data_prep prepare --logs logs.jsonl --env shop --out data/shop"

LEAST_STEPS = 50
"""Train steps below which training is refused: every batch would repeat the same few steps."""

WINDOWS, HORIZON = 200, 5
SHARD_TOKENS = 8_000_000


def ensure_dev(episodes: dict[str, list[Episode]]) -> None:
    """Move one seed or goal from train to dev if the shares left dev empty. Raises InputError for a single one."""
    if episodes.get("dev"):
        return
    groups = {group_of(episode) for episode in episodes["train"]}
    if len(groups) < 2:
        raise InputError("LOGS: must have at least 2 goals (or seeds), one of them to hold out, got 1")
    held_out = min(groups, key=lambda group: sha256(group))
    episodes["dev"] = [replace(e, split="dev") for e in episodes["train"] if group_of(e) == held_out]
    episodes["train"] = [e for e in episodes["train"] if group_of(e) != held_out]


def read_splits(args: argparse.Namespace) -> dict[str, list[Episode]]:
    """Import the logs, print what was dropped, and return episodes by split. Raises InputError for too few."""
    episodes, dropped = import_logs(args.logs, args.env, read_shares(args), args.seed)
    for reason, count in dropped.most_common():
        print(f"dropped: {count}, {reason}")
    steps = sum(map(_steps, episodes.get("train", [])))
    if steps < LEAST_STEPS:
        raise InputError(f"LOGS: must have at least {LEAST_STEPS} steps to train on, got {steps}; add episodes")
    ensure_dev(episodes)
    return episodes


def write_data(out: Path, episodes: Mapping[str, Sequence[Episode]]) -> dict[str, Any]:
    """Write episodes, shards and windows; return sizes by split."""
    encoder = LineEncoder(Tokenizer.from_file(str(TOKENIZER_FILE)))
    tokenizer_hash, sizes = sha256(TOKENIZER_FILE.read_bytes()), {}
    for split in SPLITS:
        if not (plays := episodes.get(split, [])):
            continue
        write_episodes(out / f"{split}.jsonl.xz", plays)
        sizes[split] = {
            "episodes": len(plays),
            "steps": sum(map(_steps, plays)),
            "goals": len(set(map(group_of, plays))),
        }
        if split != "test":
            encoded = (encode_episode(encoder, episode) for episode in plays)
            index = write_shards(out / f"shards-{split}", encoded, SHARD_TOKENS, tokenizer_hash, [], {})
            sizes[split]["tokens"] = index["tokens"]
        if split != "train" and (count := min(WINDOWS, sum(max(0, _steps(e) + 1 - HORIZON) for e in plays))):
            cuts = cut_any(plays, count, HORIZON, 0, f"{split}-windows")
            write_cuts(out / f"{split}-windows.jsonl.gz", cuts, HORIZON, replayed=False)
    return sizes


def _steps(episode: Episode) -> int:
    return len(episode.steps) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for shards, windows and data.json")


def run(args: argparse.Namespace) -> None:
    files = {str(path): sha256(path.read_bytes()) for path in line_files(args.logs)}
    source = {"logs": files, "environment": args.env, "dev": args.dev, "test": args.test, "seed": args.seed}
    record = args.out / "data.json"
    if record.exists():
        if read_json(record)["source"] != source:
            raise InputError(f"{record}: must be of the same logs and options; choose another --out")
        return
    episodes = read_splits(args)
    texts = [text for e in episodes["train"] for step in e.steps for text in (step.look, step.inventory)]
    shown = ["observed"] if None in texts else ["observed", "snapshot"]
    lacking = [kind for kind in CONTEXT_KINDS if kind not in shown]
    print(f"warning: contexts {', '.join(lacking)} are dropped: the logs lack what they show", file=sys.stderr)
    sizes = write_data(args.out, episodes)
    for split, size in sizes.items():
        print(f"{split}: " + ", ".join(f"{count:,} {unit}" for unit, count in size.items()))
    write_json(record, {"source": source, "contexts": shown, "sizes": sizes})
