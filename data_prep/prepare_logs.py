"""Prepare logs for fine-tuning: import, split by goal or seed, tokenize, and cut windows.

This is the first step of `loopwm train LOGS`. --out receives episodes, shards of the train and dev splits, windows of
dev and test for `loopwm eval run`, and data.json with sizes, length of rows and contexts shown. Prepared logs are
not prepared again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.import_logs import SPLITS, add_log_arguments, group_of, import_logs, read_paths, read_shares
from data_prep.tokenize import TOKENIZER_FILE, LineEncoder, encode_episode
from data_prep.windows import cut_any, write_cuts
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError, loading
from loopwm.records.files import read_json, sha256, write_json
from loopwm.records.shards import write_shards
from loopwm.records.template import CONTEXT_KINDS, ContextKind

EXAMPLE = "python -m data_prep prepare --logs logs.jsonl --env shop --out data/shop"

MOST_TOKENS = 1024
"""Tokens of the longest training rows: a context and its steps."""
LEAST_STEPS = 50
"""Train steps below which training is refused: every batch would repeat the same few steps."""

WINDOWS, HORIZON = 200, 5
SHARD_TOKENS = 8_000_000


def ensure_dev(episodes: dict[str, list[Episode]]) -> None:
    """Move a seed or goal from train to dev if dev is empty: any that leaves enough. Raises InputError for a single."""
    if episodes.get("dev"):
        return
    steps: Counter[str] = Counter()
    for episode in episodes["train"]:
        steps[group_of(episode)] += _steps(episode)
    if len(steps) < 2:
        raise InputError("LOGS: must have at least 2 goals (or seeds) beside those of test, one for dev, got 1")
    held_out = min(steps, key=lambda group: (steps.total() - steps[group] < LEAST_STEPS, sha256(group)))
    episodes["dev"] = [replace(e, split="dev") for e in episodes["train"] if group_of(e) == held_out]
    episodes["train"] = [e for e in episodes["train"] if group_of(e) != held_out]


def read_splits(args: argparse.Namespace, files: Sequence[Path], encoder: LineEncoder) -> dict[str, list[Episode]]:
    """Import the logs, print what was dropped, and return episodes by split. Raises InputError for too few."""
    episodes, dropped = import_logs(files, args.env, read_shares(args), args.seed)
    for split, plays in episodes.items():
        episodes[split] = [episode for episode in plays if _fits(encoder, episode)]
        dropped[f"one of its texts has over {MOST_TOKENS} tokens"] += len(plays) - len(episodes[split])
    for reason, count in (+dropped).most_common():
        print(f"dropped: {count}, {reason}")
    if episodes.get("train"):
        ensure_dev(episodes)
    steps = sum(map(_steps, episodes.get("train", [])))
    if steps < LEAST_STEPS:
        raise InputError(f"LOGS: must have at least {LEAST_STEPS} steps to train on, got {steps}; add episodes")
    return episodes


def _fits(encoder: LineEncoder, episode: Episode) -> bool:
    texts = [f"{step.action or episode.goal}{step.observation}" for step in episode.steps]
    return max(map(len, encoder.encode(texts))) <= MOST_TOKENS


def _offers(encoder: LineEncoder, kind: ContextKind, episodes: Sequence[Episode]) -> bool:
    """Return True if a step of the episodes fits into a row with this context."""
    for episode in episodes:
        for before, after in pairwise(episode.steps):
            now = (before.look, before.inventory, before.observation)
            shown = now if kind == "snapshot" else (episode.steps[0].observation,)
            texts = [text for text in (*shown, episode.goal, after.action, after.observation) if text is not None]
            if None not in shown and sum(map(len, encoder.encode(texts))) < MOST_TOKENS - 16:  # marks
                return True
    return False


def write_data(
    out: Path, episodes: Mapping[str, Sequence[Episode]], encoder: LineEncoder, tokenizer_hash: str
) -> dict[str, Any]:
    """Write episodes, shards and windows; return sizes by split."""
    sizes: dict[str, Any] = {}
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
        elif split != "train":
            print(f"warning: no windows of {split}, all its episodes have fewer than {HORIZON} steps", file=sys.stderr)
    return sizes


def _steps(episode: Episode) -> int:
    return len(episode.steps) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for shards, windows and data.json")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_FILE, help="tokenizer.json of the model to train")


def run(args: argparse.Namespace) -> None:
    files = read_paths(args)
    # Checkpoints spell the frozen tokenizer in another way than its file, of which shards have the hash.
    with loading(args.tokenizer):
        own, frozen = (Tokenizer.from_file(str(file)) for file in (args.tokenizer, TOKENIZER_FILE))
    tokenizer_file = TOKENIZER_FILE if own.get_vocab() == frozen.get_vocab() else args.tokenizer
    tokenizer_hash = sha256(tokenizer_file.read_bytes())
    hashes = sorted(sha256(path.read_bytes()) for path in files)
    source = {"logs": hashes, "environment": args.env, "dev": args.dev, "test": args.test, "seed": args.seed}
    source["tokenizer"] = tokenizer_hash
    record = args.out / "data.json"
    if record.exists():
        if read_json(record)["source"] != source:
            raise InputError(f"{record}: must be of the same logs, model and options; choose another --out")
        return
    encoder = LineEncoder(Tokenizer.from_file(str(tokenizer_file)))
    episodes = read_splits(args, files, encoder)
    kinds: tuple[ContextKind, ...] = ("observed", "snapshot")
    shown = [kind for kind in kinds if all(_offers(encoder, kind, episodes[split]) for split in ("train", "dev"))]
    if "observed" not in shown:
        raise InputError(f"LOGS: goal, first observation and a step must fit into {MOST_TOKENS} tokens")
    lacking = [kind for kind in CONTEXT_KINDS if kind not in shown]
    print(f"warning: contexts {', '.join(lacking)} are dropped: the logs lack what they show", file=sys.stderr)
    sizes = write_data(args.out, episodes, encoder, tokenizer_hash)
    for split, size in sizes.items():
        print(f"{split}: " + ", ".join(f"{count:,} {unit}" for unit, count in size.items()))
    write_json(record, {"source": source, "contexts": shown, "row_tokens": MOST_TOKENS, "sizes": sizes})
