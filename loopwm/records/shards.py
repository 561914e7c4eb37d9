"""Token shards: episodes as flat token arrays that numpy alone writes, checks and memory-maps.

A folder of shards holds `index.json`, written last, and five files a shard:

    NAME.tokens.npy    uint16 (tokens,)                 tokens of all texts, no special tokens, no padding
    NAME.spans.npy     SPAN_DTYPE (spans,)              which tokens are which text; ordered by episode, step, kind
    NAME.steps.npy     STEP_DTYPE (steps,)              reward and done of each step; ordered by episode, step
    NAME.offsets.npy   int64 (episodes + 1, 2)          first span and first step of each episode; last row: the totals
    NAME.episodes.json [{"env", "task", "variation", "split", "policy"}, ...]

Span fields: `start`, `length` (tokens[start : start + length]), `step` (in its episode), `kind`: 0 goal (at step 0), 1
hidden state, 2 look, 3 inventory, 4 observation, 5 action, 6 state query (an action that only looks), 7 its answer,
which follows it. A null text has no span: hidden states have one where they
were sampled, and step 0 has no action. Texts that repeat within an episode share their tokens, so spans may overlap and
tokens are fewer than span lengths add up to. Tokens are those of `loopwm.records.template.clean(text)`. `reward` is the
score minus the previous step's, in points (0 at step 0).

index.json: {"format": "loopwm-shards-v3", "tokenizer_hash" (SHA-256 of tokenizer.json), "tokens", "spans", "steps",
"episodes" (totals), "counts" ({"env/split/policy": episodes}), "sources": [{"name", "sha256"}], "renaming": {"share",
"seed"}, "shards": [{"name", "tokens", "spans", "steps", "episodes", "files": {file name: {"bytes", "sha256"}}}]}
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write
from loopwm.records.template import Regime

FORMAT = "loopwm-shards-v3"
INDEX = "index.json"
GOAL, HIDDEN, LOOK, INVENTORY, OBSERVATION, ACTION, QUERY, ANSWER = range(8)
SPAN_DTYPE = np.dtype([("start", "<i8"), ("length", "<i4"), ("step", "<i4"), ("kind", "u1")])
STEP_DTYPE = np.dtype([("reward", "<f4"), ("done", "?")])
Tokens = NDArray[np.integer]
META_FIELDS = ("env", "task", "variation", "split", "policy")
TOTALS = ("tokens", "spans", "steps", "episodes")


@dataclass(frozen=True)
class StateQueries:
    """Actions that only look, with their answers, after each step of an episode.

    Args:
        tokens: of the shard.
        actions: spans of the actions, ordered by step.
        answers: spans of their answers, aligned with `actions`.
    """

    tokens: NDArray[np.uint16]
    actions: NDArray[np.void]
    answers: NDArray[np.void]

    def at(self, step: int) -> list[tuple[Tokens, Tokens]]:
        """Return the pairs (action, answer) after a step."""
        first, end = np.searchsorted(self.actions["step"], (step, step + 1))
        return [(self._text(self.actions[i]), self._text(self.answers[i])) for i in range(first, end)]

    def _text(self, span: np.void) -> Tokens:
        return self.tokens[span["start"] : span["start"] + span["length"]]


@dataclass(frozen=True)
class TokenEpisode:
    """A tokenised episode of n steps. Index 0 of the lists is the reset, whose action is empty.

    hidden_states: None for all steps where none is known. rewards: score differences in points, dones: whether the
    world ended there; both None where nobody recorded them.
    """

    goal: Tokens
    observations: Sequence[Tokens]
    actions: Sequence[Tokens]
    looks: Sequence[Tokens | None]
    inventories: Sequence[Tokens | None]
    rewards: Sequence[float] | None = None
    dones: Sequence[bool] | None = None
    hidden_states: Sequence[Tokens | None] | None = None
    env: str = ""
    task: str = ""
    policy: str = ""
    state_queries: StateQueries | None = None

    def queries_at(self, step: int) -> list[tuple[Tokens, Tokens]]:
        """Return pairs (action, answer) of the state queries after a step; empty where none is recorded."""
        return [] if self.state_queries is None else self.state_queries.at(step)

    def head(self, step: int, regime: Regime) -> dict[str, Tokens | None]:
        """The texts that open a context at `step` before its observation, by the name of their mark."""
        texts: dict[str, Tokens | None] = {"goal": self.goal}
        if regime in ("briefed", "full"):
            texts["hidden"] = None if self.hidden_states is None else self.hidden_states[step]
        if regime in ("snapshot", "full"):
            texts |= {"look": self.looks[step], "inv": self.inventories[step]}
        return texts

    @property
    def last_step(self) -> int:
        return len(self.observations) - 1


@dataclass(frozen=True)
class EpisodeArrays:
    """One episode's tokens uint16 (n,), spans SPAN_DTYPE (s,) with starts from 0, steps STEP_DTYPE (t,), metadata."""

    tokens: NDArray[np.uint16]
    spans: NDArray[np.void]
    steps: NDArray[np.void]
    meta: Mapping[str, Any]


@dataclass
class _Shard:
    """Episodes gathered until a shard is full."""

    episodes: list[EpisodeArrays] = field(default_factory=list)
    tokens: int = 0

    def add(self, episode: EpisodeArrays) -> None:
        self.episodes.append(episode)
        self.tokens += len(episode.tokens)

    def arrays(self) -> dict[str, NDArray[Any]]:
        starts = np.cumsum([0] + [len(e.tokens) for e in self.episodes])
        spans = np.concatenate([e.spans for e in self.episodes])
        lengths = [len(e.spans) for e in self.episodes]
        spans["start"] += np.repeat(starts[:-1], lengths)
        counts = [(len(e.spans), len(e.steps)) for e in self.episodes]
        return {
            "tokens": np.concatenate([e.tokens for e in self.episodes]),
            "spans": spans,
            "steps": np.concatenate([e.steps for e in self.episodes]),
            "offsets": np.cumsum([(0, 0), *counts], axis=0, dtype=np.int64),
        }


def write_shards(
    out: Path,
    episodes: Iterable[EpisodeArrays],
    shard_tokens: int,
    tokenizer_hash: str,
    sources: list[dict[str, str]],
    renaming: Mapping[str, float],
) -> dict[str, Any]:
    """Writes shards of about `shard_tokens` tokens, then the index, which it returns.

    An older index is removed first: a folder without an index is unfinished. Raises InputError without episodes.
    """
    (out / INDEX).unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    shards: list[dict[str, Any]] = []
    for shard in _full_shards(episodes, shard_tokens):
        counts.update("/".join(str(e.meta[k]) for k in ("env", "split", "policy")) for e in shard.episodes)
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
    with atomic_write(out / INDEX) as file:
        file.write(json.dumps(index, indent=1).encode() + b"\n")
    return index


def _full_shards(episodes: Iterable[EpisodeArrays], shard_tokens: int) -> Iterator[_Shard]:
    shard = _Shard()
    for episode in episodes:
        shard.add(episode)
        if shard.tokens >= shard_tokens:
            yield shard
            shard = _Shard()
    if shard.episodes:
        yield shard


def _write_shard(out: Path, name: str, shard: _Shard) -> dict[str, Any]:
    arrays = shard.arrays()
    contents = {f"{name}.{part}.npy": _npy_bytes(array) for part, array in arrays.items()}
    metas = [{k: e.meta[k] for k in META_FIELDS} for e in shard.episodes]
    contents[f"{name}.episodes.json"] = json.dumps(metas).encode()
    for file_name, content in contents.items():
        with atomic_write(out / file_name) as file:
            file.write(content)
    files = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    sizes = {part: len(arrays[part]) for part in ("tokens", "spans", "steps")}
    return {"name": name, **sizes, "episodes": len(metas), "files": files}


def _npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def check_shards(folder: Path, tokenizer_hash: str) -> dict[str, Any]:
    """Checks format, tokenizer and the hash of every file, and returns the index.

    Raises InputError naming the file and what is wrong with it.
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


def read_shards(folder: Path, tokenizer_hash: str) -> Iterator[TokenEpisode]:
    """The episodes of a folder, their tokens memory-mapped.

    Raises InputError naming the file that is missing, damaged or made with another tokenizer.
    """
    for shard in check_shards(folder, tokenizer_hash)["shards"]:
        tokens, spans, results, offsets = (
            np.load(folder / f"{shard['name']}.{part}.npy", mmap_mode="r")
            for part in ("tokens", "spans", "steps", "offsets")
        )
        metas = json.loads((folder / f"{shard['name']}.episodes.json").read_bytes())
        for meta, ((span, step), (span_end, step_end)) in zip(metas, itertools.pairwise(offsets), strict=True):
            yield _episode(tokens, spans[span:span_end], results[step:step_end], meta)


def _episode(
    tokens: NDArray[np.uint16], spans: NDArray[np.void], results: NDArray[np.void], meta: dict[str, Any]
) -> TokenEpisode:
    def texts(kind: int) -> dict[int, NDArray[np.uint16]]:
        chosen = spans[spans["kind"] == kind]
        return {int(s["step"]): tokens[s["start"] : s["start"] + s["length"]] for s in chosen}

    observations, actions, looks, inventories, hidden = map(texts, (OBSERVATION, ACTION, LOOK, INVENTORY, HIDDEN))
    steps = range(len(observations))
    nothing = np.empty(0, dtype=np.uint16)
    return TokenEpisode(
        goal=texts(GOAL)[0],
        observations=[observations[i] for i in steps],
        actions=[actions.get(i, nothing) for i in steps],
        looks=[looks.get(i) for i in steps],
        inventories=[inventories.get(i) for i in steps],
        rewards=results["reward"].tolist(),
        dones=results["done"].tolist(),
        hidden_states=[hidden.get(i) for i in steps],
        env=meta["env"],
        task=meta["task"],
        policy=meta["policy"],
        state_queries=StateQueries(tokens, *(spans[spans["kind"] == kind] for kind in (QUERY, ANSWER))),
    )
