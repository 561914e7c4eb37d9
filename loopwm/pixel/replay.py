"""Frame replay buffer, sampled as segments of consecutive steps.

Steps belong to streams: a stream contains the steps of one environment of a vector, episode after episode. A segment
lies in one stream and may cross from one episode into the next.

Shapes: B segments, T steps each; H, W, C frame.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError, naming
from loopwm.records.frames import (
    LOST,
    FrameEpisode,
    FrameSpace,
    count_steps,
    episode_files,
    read_episode,
    write_episode,
)


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive steps of B streams.

    obs: frames before the action, uint8 (B, T, H, W, C)
    next_obs: frames after it, an episode's last frame included (obs[t + 1] is then the first of the next episode)
    action: int64 (B, T)
    reward: float32 (B, T)
    terminated, truncated: bool (B, T)
    first: bool (B, T), True where an episode begins
    lost: bool (B, T), True where a life is lost without ending the episode
    """

    obs: NDArray[np.uint8]
    next_obs: NDArray[np.uint8]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    lost: NDArray[np.bool_]


def as_learned(segments: Segments) -> Segments:
    """Mark lost lives as terminated, for returns and termination heads (STORM, table 9).

    `first` stays: the memory of world and policy continues after a lost life.
    """
    return replace(segments, terminated=segments.terminated | segments.lost)


RewardUnit = Literal["raw", "sign"]
T = TypeVar("T", Segments, FrameEpisode)


def rewarded(steps: T, unit: RewardUnit) -> T:
    """Convert rewards to this unit."""
    return steps if unit == "raw" else replace(steps, reward=np.sign(steps.reward))


@dataclass(frozen=True, eq=False)
class _Piece:
    """Episode, or a part of one. fresh: True if it begins with an episode's first step."""

    episode: FrameEpisode
    stream: int
    number: int
    fresh: bool

    def cut(self, start: int, stop: int) -> tuple[NDArray[Any], ...]:
        """Return the steps from start to stop, in the order of Segments' fields."""
        episode, first = self.episode, np.zeros(stop - start, dtype=bool)
        first[0] = self.fresh and start == 0
        steps = slice(start, stop)
        results = (getattr(episode, name)[steps] for name in ("action", "reward", "terminated", "truncated"))
        # Extras are per frame: a step's flag is that of the frame it leads to.
        lost = episode.extras.get(LOST, np.zeros(len(episode) + 1, dtype=bool))[start + 1 : stop + 1]
        return episode.obs[steps], episode.obs[start + 1 : stop + 1], *results, first, lost


@dataclass
class _Stream:
    """Pieces in order. Step numbers count from the stream's beginning; dropping old pieces does not change them.

    open_at: last frame (H, W, C) of an unfinished episode, None if the next piece begins an episode.
    """

    pieces: deque[_Piece] = field(default_factory=deque)
    starts: deque[int] = field(default_factory=deque)
    end: int = 0
    open_at: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return self.end - self.starts[0] if self.starts else 0

    def append(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.starts.append(self.end)
        self.end += len(piece.episode)
        self.open_at = piece.episode.obs[-1] if piece.episode.open else None

    def ages(self) -> NDArray[np.int64]:
        """Return the insertion number of each step."""
        return np.repeat([piece.number for piece in self.pieces], [len(piece.episode) for piece in self.pieces])

    def copy(self, start: int, length: int, columns: Sequence[NDArray[Any]]) -> None:
        """Copy `length` steps from the `start`-th retained one to columns in the order of Segments' fields."""
        start += self.starts[0]
        index, done = bisect_right(self.starts, start) - 1, 0
        while done < length:
            piece, begin = self.pieces[index], start + done - self.starts[index]
            count = min(length - done, len(piece.episode) - begin)
            for column, steps in zip(columns, piece.cut(begin, begin + count), strict=True):
                column[done : done + count] = steps[: len(column)]  # `next_obs` may be left out
            done, index = done + count, index + 1


class Replay:
    """Buffer of the newest steps of one environment.

    Sampling depends on the generator only, so there is no loader state.
    """

    def __init__(self, space: FrameSpace, capacity: int) -> None:
        """Create an empty buffer of `capacity` transitions. Raises InputError for a capacity below 1."""
        if capacity < 1:
            raise InputError(f"capacity: must be at least 1, got {capacity}")
        self.space, self.capacity = space, capacity
        self._streams: dict[int, _Stream] = {}
        self._pieces: deque[_Piece] = deque()
        self._steps, self._added = 0, 0
        self._written: tuple[Path, set[int]] | None = None
        self._starts_by_age: tuple[int, int, NDArray[np.int64]] | None = None
        """Insertion count, segment length and the result of `_by_age` for them."""

    @classmethod
    def from_folder(cls, folder: Path) -> Replay:
        """Load the episodes of a folder by name as one stream. Raises InputError for none, or of several spaces."""
        files = episode_files(folder)
        replay = cls(read_episode(files[0]).space, sum(map(count_steps, files)))
        for path in files:
            with naming(f"{path}: "):
                replay.add(read_episode(path))
            replay._streams[0].open_at = None  # files of several recordings do not continue one another
        return replay

    def __len__(self) -> int:
        """Return the number of transitions."""
        return self._steps

    def add(self, episode: FrameEpisode, stream: int = 0) -> None:
        """Append an episode to a stream, and drop the oldest episodes beyond the capacity.

        The next episode of the stream continues one that ended open.

        Raises InputError for an episode of another environment, one longer than the capacity, and one that does not
        begin with the last frame of the stream's open episode.
        """
        self.space.require(episode.space, "episode")
        if len(episode) > self.capacity:
            raise InputError(f"episode: must have at most {self.capacity} steps (capacity), got {len(episode)}")
        open_at = self._streams[stream].open_at if stream in self._streams else None
        if open_at is not None and not np.array_equal(open_at, episode.obs[0]):
            raise InputError(f"episode: must begin with the last frame of stream {stream}'s open episode")
        self._append(_Piece(episode, stream, self._added, fresh=open_at is None))
        while self._steps > self.capacity:
            oldest = self._pieces.popleft()
            stream_of_oldest = self._streams[oldest.stream]  # its pieces are in order, too
            stream_of_oldest.pieces.popleft()
            stream_of_oldest.starts.popleft()
            self._steps -= len(oldest.episode)

    def add_segments(self, segments: Segments, policy: str, seed: int) -> None:
        """Append segments, row b to stream b; a row that begins with an episode closes its stream's open one.

        policy, seed: as recorded in the episodes. Raises InputError as `add`.
        """
        for stream, row in enumerate(zip(*(getattr(segments, f.name) for f in fields(Segments)), strict=True)):
            *_, terminated, truncated, first, _ = row
            if first[0] and stream in self._streams:  # reset without an end
                self._streams[stream].open_at = None
            ends = np.flatnonzero(terminated | truncated) + 1
            for steps in np.split(np.arange(len(first)), ends):
                if len(steps):  # none after an end at the last step
                    self.add(_episode(self.space, row, steps, policy, seed), stream)

    def _append(self, piece: _Piece) -> None:
        self._streams.setdefault(piece.stream, _Stream()).append(piece)
        self._pieces.append(piece)
        self._steps += len(piece.episode)
        self._added = piece.number + 1

    def episodes(self) -> list[FrameEpisode]:
        """Return the retained episodes, oldest first."""
        return [piece.episode for piece in self._pieces]

    def sample(
        self, batch: int, length: int, rng: np.random.Generator, shares: Sequence[float] = (), following: bool = True
    ) -> Segments:
        """Sample `batch` segments of `length` consecutive steps, with replacement, uniformly over all possible starts.

        shares: probability of each of equally large parts of the starts, oldest first; empty for uniform. following:
        False leaves `next_obs` empty, half of the bytes. Raises InputError if no stream has `length` steps.
        """
        streams = [self._streams[name] for name in sorted(self._streams)]
        ends = np.cumsum([max(0, len(stream) - length + 1) for stream in streams])  # possible starts
        if length < 1 or not streams or ends[-1] == 0:
            longest = max(map(len, streams), default=0)
            raise InputError(f"length: must be 1 to {longest} steps (longest stream), got {length}")
        index = rng.integers(ends[-1], size=batch)
        if shares:
            part = rng.choice(len(shares), size=batch, p=np.divide(shares, sum(shares)))
            places = (part + index / ends[-1]) / len(shares) * int(ends[-1])  # the same place within that part
            index = self._by_age(streams, length)[places.astype(np.int64)]
        # side="right": an index equal to the end of a stream is the first start of the next one.
        owners = np.searchsorted(ends, index, side="right")
        starts = index - np.concatenate(([0], ends))[owners]
        frames = (np.empty((batch, n, *self.space.frame_shape), np.uint8) for n in (length, length * following))
        columns = *frames, *(np.empty((batch, length), kind) for kind in (np.int64, np.float32, *4 * [bool]))
        for row, (owner, start) in enumerate(zip(owners, starts.tolist(), strict=True)):
            streams[owner].copy(start, length, [column[row] for column in columns])
        return Segments(*columns)

    def _by_age(self, streams: Sequence[_Stream], length: int) -> NDArray[np.int64]:
        """Return the possible starts, as `sample` numbers them, in insertion order."""
        if self._starts_by_age is None or self._starts_by_age[:2] != (self._added, length):
            ages = [stream.ages()[: max(0, len(stream) - length + 1)] for stream in streams]
            self._starts_by_age = self._added, length, np.argsort(np.concatenate(ages), kind="stable")
        return self._starts_by_age[2]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write new episodes, one file each, and return the rest of the state for `load`: plain data for a checkpoint.

        Deletes no files, since an earlier checkpoint may need them: see `prune`.
        """
        if self._written is None or self._written[0] != folder:  # another folder has no file of ours
            self._written = (folder, set())
        written = self._written[1]
        for piece in self._pieces:
            if piece.number not in written:
                write_episode(folder / _file_name(piece.number), piece.episode)
                written.add(piece.number)
        space = {f.name: getattr(self.space, f.name) for f in fields(FrameSpace)}
        rows = [[piece.number, piece.stream, piece.fresh] for piece in self._pieces]
        return {"space": space, "capacity": self.capacity, "added": self._added, "pieces": rows}

    @classmethod
    def load(cls, folder: Path, state: dict[str, Any]) -> Replay:
        """Restore the replay from the state of `save`. Raises InputError, naming the file, if one cannot be read."""
        space = FrameSpace(**{**state["space"], "frame_shape": tuple(state["space"]["frame_shape"])})
        replay = cls(space, state["capacity"])
        for number, stream, fresh in state["pieces"]:
            path = folder / _file_name(number)
            episode = read_episode(path)
            space.require(episode.space, str(path))
            replay._append(_Piece(episode, stream, number, fresh))
        replay._added = state["added"]
        replay._written = (folder, {number for number, _, _ in state["pieces"]})
        return replay


def prune(folder: Path, states: Collection[dict[str, Any]]) -> None:
    """Delete the files that none of the states (of `save`) needs."""
    needed = {_file_name(number) for state in states for number, _, _ in state["pieces"]}
    for path in folder.glob("*.npz"):
        if path.name not in needed:
            path.unlink()


def _file_name(number: int) -> str:
    return f"{number:08d}.npz"


def _episode(
    space: FrameSpace, row: tuple[NDArray[Any], ...], steps: NDArray[np.int64], policy: str, seed: int
) -> FrameEpisode:
    """Cut consecutive steps out of a row of segments, whose fields come in the order of Segments."""
    obs, next_obs, *results, _, lost = row
    frames = np.concatenate((obs[steps], next_obs[steps[-1:]]))
    action, reward, terminated, truncated = (column[steps] for column in results)
    extras = {LOST: np.concatenate(([False], lost[steps]))} if lost[steps].any() else {}
    return FrameEpisode(space, frames, action, reward, terminated, truncated, seed, policy, extras)
