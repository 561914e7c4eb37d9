"""Frame episodes, one compressed `.npz` a file: the frames of an environment, actions and outcomes.

Torch-free: data preparation and training share it. T transitions, so T + 1 frames; H, W, C: shape of a frame.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write

FORMAT = "loopwm-frames-v1"
_ARRAYS = ("obs", "action", "reward", "terminated", "truncated")
_EXTRA = "extra."

LOST = "lost"
"""Name of a per-frame extra: bool, True if a life was lost since the frame before."""


@dataclass(frozen=True)
class FrameSpace:
    """Observations and actions of an environment: uint8 frames of `frame_shape` (H, W, C), actions 0 to `actions` - 1.

    `env` is its name, `version` the simulator's with every setting that changes outcomes.
    """

    env: str
    version: str
    frame_shape: tuple[int, int, int]
    actions: int

    def require(self, other: FrameSpace, what: str) -> None:
        """Raise InputError naming the first field in which `other`, the space of `what`, differs."""
        for name in ("env", "version", "frame_shape", "actions"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise InputError(f"{what}: {name} is {theirs!r}, expected {ours!r}")


@dataclass(frozen=True, eq=False)
class FrameEpisode:
    """Consecutive steps of one environment; may be open, with the last step neither terminated nor truncated.

    obs: uint8 (T + 1, H, W, C); action: int64 (T,); reward: float32 (T,); terminated, truncated: bool (T,), True at
    most in the last step; seed: of the environment's reset; extras: further arrays of each frame (T + 1, ...). Raises
    InputError for anything else.
    """

    space: FrameSpace
    obs: NDArray[np.uint8]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    seed: int
    policy: str
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = len(self.action)
        if steps == 0:
            raise InputError("action: at least one step is needed")
        _check("obs", self.obs, np.uint8, (steps + 1, *self.space.frame_shape))
        for name, dtype in (("action", np.int64), ("reward", np.float32), ("terminated", bool), ("truncated", bool)):
            _check(name, getattr(self, name), dtype, (steps,))
        for name, array in self.extras.items():
            if array.dtype.hasobject or array.shape[:1] != (steps + 1,):
                raise InputError(f"extras: {name}: expected {steps + 1} rows, got {array.dtype} {array.shape}")
        low, high = int(self.action.min()), int(self.action.max())
        if low < 0 or high >= self.space.actions:
            outside = low if low < 0 else high
            raise InputError(f"action: {outside} is not one of the {self.space.actions} of {self.space.env}")
        for name in ("terminated", "truncated"):
            if getattr(self, name)[:-1].any():
                raise InputError(f"{name}: true before the last step")

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.action)

    @property
    def open(self) -> bool:
        """Return True if the episode continues after the last step."""
        return not (self.terminated[-1] or self.truncated[-1])


def _check(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise InputError(f"{name}: expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")


def write_episode(path: Path, episode: FrameEpisode) -> None:
    """Write one episode atomically. The bytes depend on the episode only."""
    space = episode.space
    about = {"format": FORMAT, "env": space.env, "version": space.version, "policy": episode.policy}
    arrays: dict[str, NDArray[Any]] = {
        **{name: np.array(value) for name, value in about.items()},
        "actions": np.array(space.actions),
        "seed": np.array(episode.seed),
        **{name: getattr(episode, name) for name in _ARRAYS},
        **{_EXTRA + name: array for name, array in episode.extras.items()},
    }
    with atomic_write(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_episode(path: Path) -> FrameEpisode:
    """Read one episode. Raises InputError naming the file and, if there is one, the field at fault."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _from_arrays(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:
        raise InputError(f"{path}: not an episode of frames ({error.args[0]})") from error
    except _UNREADABLE as error:
        raise InputError(f"{path}: not a readable episode of frames ({error})") from error


def count_steps(path: Path) -> int:
    """Count the transitions of an episode file without reading its frames. Raises InputError as `read_episode`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return len(arrays["action"])
    except (KeyError, *_UNREADABLE) as error:
        raise InputError(f"{path}: not a readable episode of frames ({error})") from error


_UNREADABLE = (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error)
"""Exceptions of numpy for a file that is missing, damaged, or a lone `.npy` (an array, which cannot be closed)."""


def _from_arrays(arrays: Any) -> FrameEpisode:
    if (version := str(arrays["format"])) != FORMAT:
        raise InputError(f"format: {version!r}, expected {FORMAT!r}")
    fields = {name: arrays[name] for name in _ARRAYS}
    shape = fields["obs"].shape[1:]
    if len(shape) != 3:
        raise InputError(f"obs: expected (T + 1, H, W, C), got {fields['obs'].shape}")
    space = FrameSpace(str(arrays["env"]), str(arrays["version"]), shape, int(arrays["actions"]))
    extras = {name.removeprefix(_EXTRA): arrays[name] for name in arrays.files if name.startswith(_EXTRA)}
    return FrameEpisode(space, **fields, seed=int(arrays["seed"]), policy=str(arrays["policy"]), extras=extras)


def episode_files(folder: Path) -> list[Path]:
    """Return the episode files of a folder, sorted by name. Raises InputError if there is none."""
    files = sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))
    if not files:
        raise InputError(f"{folder}: no episodes of frames (.npz)")
    return files
