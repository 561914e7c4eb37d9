"""Token shards: episodes as flat token arrays that numpy alone writes, checks and memory-maps.

A folder of shards holds `index.json`, written last, and six files a shard:

    NAME.tokens.npy    uint16 or uint32 (tokens,)       tokens of all texts, no special tokens, no padding
    NAME.spans.npy     SPAN_DTYPE (spans,)              which tokens are which text; ordered by episode, step, kind
    NAME.steps.npy     STEP_DTYPE (steps,)              reward, done, accepted of each; ordered by episode, step
    NAME.facts.npy     FACT_DTYPE (facts,)              what texts show, and what determines their tokens
    NAME.offsets.npy   int64 (episodes + 1, 3)          first span, step, fact of each episode; last row: the totals
    NAME.episodes.json [{"env", "task", "variation", "split", "policy", "hash"}, ...]

Span fields: `start`, `length` (tokens[start : start + length]), `step` (in its episode), `kind`: 0 goal (at step 0), 1
hidden state, 2 look, 3 inventory, 4 observation, 5 action, 6 state query (an action that only looks), 7 its answer,
which follows it. A null text has no span: hidden states have one where they were sampled, and step 0 has no action.
Texts that repeat within an episode share their tokens, so spans may overlap and tokens are fewer than span lengths add
up to. Tokens are those of `loopwm.records.template.clean(text)`. `reward` is the score minus the previous step's, in
points (0 at step 0). `hash`: `loopwm.records.training_episodes.episode_hash` of the episode before anything in it was
renamed.

Fact fields: `start`, `length`, `fact` (numbered by episode), ordered by episode, start, length. With length 0, the text
that starts there shows the fact; otherwise tokens[start : start + length] are determined for a reader who knows the
fact, and so by each of several. Tokens without facts are determined by the rules of their world. An environment says
what the facts of its texts are: those of all texts but goals and hidden states.

index.json: {"format": "loopwm-shards-v5", "tokenizer_hash" (SHA-256 of tokenizer.json), "tokens", "spans", "steps",
"facts", "episodes" (totals), "counts" ({"env/split/policy": episodes}), "sources": [{"name", "sha256"}], "renaming":
{"share", "seed"} or {}, "shards": [{"name", the same totals, "files": {file name: {"bytes", "sha256"}}}]}
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.records.token_episode import TokenEpisode

FORMAT = "loopwm-shards-v5"
INDEX = "index.json"
META_FIELDS = ("env", "task", "variation", "split", "policy")
PARTS = ("tokens", "spans", "steps", "facts")
"""Arrays of a shard, besides the offsets of its episodes in all but the first."""

TOTALS = (*PARTS, "episodes")


@dataclass(frozen=True)
class EpisodeArrays:
    """Arrays of one episode.

    Tokens uint16 (n,), uint32 of a large vocabulary, spans SPAN_DTYPE (s,), facts FACT_DTYPE (f,) with starts from 0,
    steps STEP_DTYPE (t,), metadata.
    """

    tokens: NDArray[np.unsignedinteger]
    spans: NDArray[np.void]
    steps: NDArray[np.void]
    facts: NDArray[np.void]
    meta: Mapping[str, Any]


def _arrays(episodes: Sequence[EpisodeArrays]) -> dict[str, NDArray[Any]]:
    arrays = {part: np.concatenate([getattr(e, part) for e in episodes]) for part in PARTS}
    starts = np.cumsum([0] + [len(e.tokens) for e in episodes])[:-1]
    for part in ("spans", "facts"):
        arrays[part]["start"] += np.repeat(starts, [len(getattr(e, part)) for e in episodes])
    counts = [[len(getattr(e, part)) for part in PARTS[1:]] for e in episodes]
    return arrays | {"offsets": np.cumsum([[0] * len(PARTS[1:]), *counts], axis=0, dtype=np.int64)}


def write_shards(
    out: Path,
    episodes: Iterable[EpisodeArrays],
    shard_tokens: int,
    tokenizer_hash: str,
    sources: list[dict[str, str]],
    renaming: Mapping[str, float],
) -> dict[str, Any]:
    """Write shards of about `shard_tokens` tokens, then the index, and return it.

    An older index is removed first: a folder without an index is unfinished. Raises InputError without episodes.
    """
    (out / INDEX).unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    shards: list[dict[str, Any]] = []
    for shard in _full_shards(episodes, shard_tokens):
        counts.update("/".join(str(e.meta[k]) for k in ("env", "split", "policy")) for e in shard)
        shards.append(_write_shard(out, f"{len(shards):05d}", shard))
    if not shards:
        raise InputError("--episodes: no episodes in the given files")
    index = {
        "format": FORMAT,
        "tokenizer_hash": tokenizer_hash,
        **{total: sum(shard[total] for shard in shards) for total in TOTALS},
        "counts": dict(sorted(counts.items())),
        "sources": sources,
        "renaming": dict(renaming),
        "shards": shards,
    }
    write_atomic(out / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _full_shards(episodes: Iterable[EpisodeArrays], shard_tokens: int) -> Iterator[list[EpisodeArrays]]:
    shard: list[EpisodeArrays] = []
    tokens = 0
    for episode in episodes:
        shard.append(episode)
        tokens += len(episode.tokens)
        if tokens >= shard_tokens:
            yield shard
            shard, tokens = [], 0
    if shard:
        yield shard


def _write_shard(out: Path, name: str, shard: Sequence[EpisodeArrays]) -> dict[str, Any]:
    arrays = _arrays(shard)
    contents = {f"{name}.{part}.npy": _npy_bytes(array) for part, array in arrays.items()}
    metas = [{k: e.meta[k] for k in (*META_FIELDS, "hash")} for e in shard]
    contents[f"{name}.episodes.json"] = json.dumps(metas).encode()
    for file_name, content in contents.items():
        write_atomic(out / file_name, content)
    files = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    sizes = {part: len(arrays[part]) for part in PARTS}
    return {"name": name, **sizes, "episodes": len(metas), "files": files}


def _npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def check_shards(folder: Path, tokenizer_hash: str) -> dict[str, Any]:
    """Check format, tokenizer and the hash of every file; return the index.

    Raises InputError naming the file and the fault.
    """
    path = folder / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
        kind, made_with = index["format"], index["tokenizer_hash"]
        files = {name: entry for shard in index["shards"] for name, entry in shard["files"].items()}
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing (not a folder of shards, or unfinished)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not an index of shards ({error!r})") from error
    if kind != FORMAT:
        raise InputError(f"{path}: format: {kind!r}, expected {FORMAT!r}: tokenize the episodes again")
    if made_with != tokenizer_hash:
        raise InputError(f"{path}: tokenizer_hash: made with another tokenizer ({made_with[:12]}..)")
    for name, entry in files.items():
        _check_file(folder / name, entry)
    return index


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise InputError(f"{path}: missing")
    if path.stat().st_size != entry["bytes"]:
        raise InputError(f"{path}: {path.stat().st_size} bytes, the index says {entry['bytes']}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise InputError(f"{path}: contents differ from the index (sha256)")


def read_metadata(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the episodes of a folder that `check_shards` has passed."""
    for shard in json.loads((folder / INDEX).read_bytes())["shards"]:
        yield from json.loads((folder / f"{shard['name']}.episodes.json").read_bytes())


def read_shards(folder: Path, tokenizer_hash: str) -> Iterator[TokenEpisode]:
    """Yield the episodes of a folder, memory-mapped: data is read from disk on access.

    Raises InputError naming the file that is missing, damaged or made with another tokenizer.
    """
    for shard in check_shards(folder, tokenizer_hash)["shards"]:
        # Plain arrays: slices of `np.memmap` each have a dictionary of their own.
        tokens, *parts, offsets = (
            np.load(folder / f"{shard['name']}.{part}.npy", mmap_mode="r").view(np.ndarray)
            for part in (*PARTS, "offsets")
        )
        metas = json.loads((folder / f"{shard['name']}.episodes.json").read_bytes())
        for meta, (first, last) in zip(metas, itertools.pairwise(offsets.tolist()), strict=True):
            spans, steps, facts = (part[a:b] for part, a, b in zip(parts, first, last, strict=True))
            yield TokenEpisode(tokens, spans, steps, facts, meta["env"], meta["task"], meta["policy"])
