"""Hashes of the episodes that a checkpoint was trained on, from which evaluations derive unseen and seen windows.

`training_episodes.npz` has two arrays of sorted uint64 for each environment: `episodes/ENV`, the hashes of episodes,
and `games/ENV`, those of their games. An episode is hashed as it was recorded, so one that was renamed for training
counts as its original.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loopwm.records.episodes import TRAIN_SPLITS, Episode
from loopwm.records.errors import InputError
from loopwm.records.shards import read_metadata

FILE = "training_episodes.npz"
Hashes = NDArray[np.uint64]


def episode_hash(episode: Episode) -> str:
    """Return 64 bits in hexadecimal: of environment, task, variation, actions and observations."""
    steps = [(step.action, step.observation) for step in episode.steps]
    return _hash(json.dumps([episode.env, episode.task, episode.variation, steps], ensure_ascii=False))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TrainingEpisodes:
    """Sorted hashes by the names that the file gives them."""

    hashes: Mapping[str, Hashes]

    @classmethod
    def of_shards(cls, folders: Iterable[Path]) -> Self:
        """Collect the hashes of training shards.

        Raises InputError for an episode of a held-out split, or without a hash.
        """
        hashes: defaultdict[str, set[int]] = defaultdict(set)
        for folder in folders:
            for number, meta in enumerate(read_metadata(folder), start=1):
                env, split = meta["env"], meta["split"]
                if split not in TRAIN_SPLITS:
                    raise InputError(
                        f"data.train: {folder}: episode {number} is of split {split!r} ({env}, {meta['task']}): "
                        f"tokenize those of {' and '.join(TRAIN_SPLITS)} only, or name it under data.dev"
                    )
                if "hash" not in meta:
                    raise InputError(f"data.train: {folder}: has no hashes of episodes: tokenize the episodes again")
                hashes[f"episodes/{env}"].add(int(meta["hash"], 16))
                hashes[f"games/{env}"].add(int(_hash(f"{env}/{meta['task']}/{meta['variation']}"), 16))
        return cls({name: np.array(sorted(some), dtype=np.uint64) for name, some in hashes.items()})

    def joined(self, other: TrainingEpisodes | None) -> TrainingEpisodes | None:
        """Return the union; None (unknown) if `other` is None."""
        if other is None:
            return None
        names = sorted(self.hashes.keys() | other.hashes.keys())
        return TrainingEpisodes({name: np.union1d(self._of(name), other._of(name)) for name in names})

    def episodes(self, env: str) -> frozenset[int]:
        return frozenset(self._of(f"episodes/{env}").tolist())

    def holds_game(self, env: str, game: str) -> bool:
        """Return True if episodes of a game are among them. game: as `loopwm.records.windows.game_of` names it."""
        return bool(np.isin(np.uint64(int(_hash(game), 16)), self._of(f"games/{env}")))

    def _of(self, name: str) -> Hashes:
        return self.hashes.get(name, np.empty(0, dtype=np.uint64))

    def save(self, folder: Path) -> None:
        with (folder / FILE).open("wb") as file:
            np.savez(file, **{name: self.hashes[name] for name in sorted(self.hashes)})  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Load the hashes of a checkpoint, None without the file. Raises InputError for a damaged file."""
        if not (folder / FILE).is_file():
            return None
        try:
            with np.load(folder / FILE, allow_pickle=False) as file:
                return cls({name: file[name].astype(np.uint64, casting="safe") for name in file})
        except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise InputError(f"{folder / FILE}: not a file of training episodes ({error})") from error

    def state_dict(self) -> dict[str, str]:
        """Convert to JSON, for a run's own checkpoints."""
        return {name: some.astype("<u8").tobytes().hex() for name, some in self.hashes.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, str] | None) -> Self | None:
        """Load from JSON; None for a checkpoint from before hashes were kept."""
        if state is None:
            return None
        return cls({name: np.frombuffer(bytes.fromhex(some), "<u8").astype(np.uint64) for name, some in state.items()})


def digest(hashes: Iterable[int]) -> str:
    """Return the SHA-256 of a set of hashes, in any order."""
    return hashlib.sha256(np.array(sorted(set(hashes)), dtype="<u8").tobytes()).hexdigest()
