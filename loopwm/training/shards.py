"""Reads token shards with numpy alone; `python -m data_prep tokenize` writes them.

A folder holds index.json and, for each shard, tokens (uint16), spans (start, length, step, kind), steps (reward,
done), offsets (first span and step of each episode) and metadata (world and policy). Everything the index says is
checked first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.text.tree import TokenEpisode

FORMAT = "loopwm-shards-v2"
GOAL, HIDDEN, LOOK, INVENTORY, OBSERVATION, ACTION = range(6)


def read_shards(folder: Path, tokenizer_hash: str) -> Iterator[TokenEpisode]:
    """The episodes of a folder, their tokens memory-mapped.

    Raises InputError naming the file that is missing, damaged or made with another tokenizer.
    """
    for shard in _checked_index(folder, tokenizer_hash)["shards"]:
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
        policy=meta["policy"],
    )


def _checked_index(folder: Path, tokenizer_hash: str) -> dict[str, Any]:
    path = folder / "index.json"
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
        made_with, kind = index["tokenizer_hash"], index["format"]
        files = {name: entry for shard in index["shards"] for name, entry in shard["files"].items()}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (not a folder of shards, or an unfinished one)") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not an index of shards ({error!r})") from None
    if kind != FORMAT:
        raise InputError(f"{path}: format is {kind!r}, expected {FORMAT!r}: tokenize the episodes again")
    if made_with != tokenizer_hash:
        raise InputError(f"{path}: tokenizer_hash: the shards were made with another tokenizer")
    for name, entry in files.items():
        _check_file(folder / name, entry)
    return index


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise InputError(f"{path}: its contents differ from what index.json says (sha256)")
