"""Frame replay: what was played, kept up to a capacity, sampled as segments of consecutive steps.

Steps belong to streams; a stream is what one environment of a vector played, episode after episode. A segment lies in
one stream and may cross from one episode into the next. B segments, T steps each; H, W, C: shape of a frame.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError
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
    """Steps as they were played.

    obs, next_obs: uint8 (B, T, H, W, C), next_obs[t] being what the action led to, an episode's last frame included
    (obs[t + 1] is then the first of the next episode); action: int64 (B, T); reward: float32 (B, T); terminated,
    truncated, first, lost: bool (B, T), first True where an episode begins, lost where a life is, which ends none.
    """

    obs: NDArray[np.uint8]
    next_obs: NDArray[np.uint8]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    lost: NDArray[np.bool_]

    def rows(self, chosen: slice) -> Segments:
        return Segments(*(getattr(self, column.name)[chosen] for column in fields(self)))


def as_learned(segments: Segments) -> Segments:
    """The same steps for returns and for heads of ends, to which a lost life is an end (STORM, table 9).

    `first` stays: what a world and a policy remember goes on.
    """
    return replace(segments, terminated=segments.terminated | segments.lost)


RewardUnit = Literal["raw", "sign"]


T = TypeVar("T", Segments, FrameEpisode)


def rewarded(steps: T, unit: RewardUnit) -> T:
    """The same steps with rewards in this unit."""
    return steps if unit == "raw" else replace(steps, reward=np.sign(steps.reward))


@dataclass(frozen=True, eq=False)
class _Piece:
    """An episode as it was added, or a part of one. `fresh`: it begins with an episode's first step."""

    episode: FrameEpisode
    stream: int
    number: int
    fresh: bool

    def cut(self, start: int, stop: int) -> tuple[NDArray[Any], ...]:
        """The steps from start to stop, in the order of Segments' fields."""
        episode, first = self.episode, np.zeros(stop - start, dtype=bool)
        first[0] = self.fresh and start == 0
        steps = slice(start, stop)
        results = (getattr(episode, name)[steps] for name in ("action", "reward", "terminated", "truncated"))
        lost = episode.extras.get(LOST, np.zeros(len(episode) + 1, dtype=bool))[start + 1 : stop + 1]
        return episode.obs[steps], episode.obs[start + 1 : stop + 1], *results, first, lost


@dataclass
class _Stream:
    """Pieces in order. Step numbers count from the stream's beginning and stay when old pieces are dropped.

    open_at: the last frame (H, W, C) of an episode that goes on, None where the next one begins.
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

    def drop_oldest(self) -> None:
        self.pieces.popleft()
        self.starts.popleft()

    def ages(self) -> NDArray[np.int64]:
        """Of each step the number of the addition that brought it."""
        return np.repeat([piece.number for piece in self.pieces], [len(piece.episode) for piece in self.pieces])

    def cuts(self, start: int, length: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """`length` steps from the `start`-th that is kept, piece by piece."""
        start += self.starts[0]
        index, stop = bisect_right(self.starts, start) - 1, start + length
        while start < stop:
            piece, begin = self.pieces[index], self.starts[index]
            until = min(stop, begin + len(piece.episode))
            yield piece.cut(start - begin, until - begin)
            start, index = until, index + 1


class Replay:
    """The newest steps of one environment. Sampling depends on the generator alone: there is no cursor to keep."""

    def __init__(self, space: FrameSpace, capacity: int) -> None:
        """capacity: in transitions. Raises InputError if it is below 1."""
        if capacity < 1:
            raise InputError(f"capacity: {capacity} is below 1")
        self.space, self.capacity = space, capacity
        self._streams: dict[int, _Stream] = {}
        self._pieces: deque[_Piece] = deque()
        self._steps, self._added = 0, 0
        self._written: tuple[Path, set[int]] | None = None
        self._aged: tuple[int, int, NDArray[np.int64]] | None = None
        """Of so many additions and a length: see `_by_age`."""

    @classmethod
    def from_folder(cls, folder: Path, capacity: int | None = None) -> Replay:
        """All episodes of a folder in the order of their names, as one stream; the newest of them if there is a
        capacity. Raises InputError for a folder without episodes, or with those of several environments."""
        files = episode_files(folder)
        replay = cls(read_episode(files[0]).space, sum(map(count_steps, files)) if capacity is None else capacity)
        for path in files:
            try:
                replay.add(read_episode(path))
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
        return replay

    def __len__(self) -> int:
        """Transitions."""
        return self._steps

    def add(self, episode: FrameEpisode, stream: int = 0) -> None:
        """Appends an episode to a stream, and drops the oldest of all beyond the capacity.

        An episode that ended open is continued by the next of its stream. Raises InputError for an episode of another
        environment, longer than the capacity, or that does not begin with the frame at which the stream is open.
        """
        self.space.require(episode.space, "episode")
        if len(episode) > self.capacity:
            raise InputError(f"episode: its {len(episode)} steps are more than the capacity {self.capacity}")
        open_at = self._streams[stream].open_at if stream in self._streams else None
        if open_at is not None and not np.array_equal(open_at, episode.obs[0]):
            raise InputError(f"episode: does not continue stream {stream}, which is open at another frame")
        self._append(_Piece(episode, stream, self._added, fresh=open_at is None))
        while self._steps > self.capacity:
            oldest = self._pieces.popleft()
            self._streams[oldest.stream].drop_oldest()
            self._steps -= len(oldest.episode)

    def add_segments(self, segments: Segments, policy: str, seed: int) -> None:
        """Adds steps that were played, row b to stream b; a stream whose row begins with an episode is open no more.

        policy, seed: who played, and the seed of the run. Raises InputError as `add` does.
        """
        for stream, row in enumerate(zip(*(getattr(segments, f.name) for f in fields(Segments)), strict=True)):
            *_, terminated, truncated, first, _ = row
            if first[0] and stream in self._streams:
                self._streams[stream].open_at = None
            ends = np.flatnonzero(terminated | truncated) + 1
            for steps in np.split(np.arange(len(first)), ends):
                if len(steps):
                    self.add(_episode(self.space, row, steps, policy, seed), stream)

    def _append(self, piece: _Piece) -> None:
        self._streams.setdefault(piece.stream, _Stream()).append(piece)
        self._pieces.append(piece)
        self._steps += len(piece.episode)
        self._added = piece.number + 1

    def episodes(self) -> list[FrameEpisode]:
        """What is kept, oldest first."""
        return [piece.episode for piece in self._pieces]

    def sample(self, batch: int, length: int, generator: np.random.Generator, shares: Sequence[float] = ()) -> Segments:
        """`batch` segments of `length` consecutive steps; their starts are drawn uniformly from all that are possible,
        with replacement. Raises InputError if no stream is that long.

        shares: of as many parts of them as there are shares, equally many starts in each and the oldest first, how much
        is drawn from each."""
        streams = [self._streams[name] for name in sorted(self._streams)]
        ends = np.cumsum([max(0, len(stream) - length + 1) for stream in streams])
        if length < 1 or not streams or ends[-1] == 0:
            longest = max(map(len, streams), default=0)
            raise InputError(f"length: {length} consecutive steps cannot be had, the longest stream has {longest}")
        drawn = generator.integers(ends[-1], size=batch)
        if shares:
            drawn = self._by_age(streams, length)[_in_parts(drawn / ends[-1], int(ends[-1]), shares, generator)]
        owners = np.searchsorted(ends, drawn, side="right")
        starts = drawn - np.concatenate(([0], ends))[owners]
        rows = [_row(streams[owner], int(start), length) for owner, start in zip(owners, starts, strict=True)]
        return Segments(*map(np.stack, zip(*rows, strict=True)))

    def _by_age(self, streams: Sequence[_Stream], length: int) -> NDArray[np.int64]:
        """The possible starts, as `sample` numbers them, in the order in which they were added."""
        if self._aged is None or self._aged[:2] != (self._added, length):
            ages = [stream.ages()[: max(0, len(stream) - length + 1)] for stream in streams]
            self._aged = self._added, length, np.argsort(np.concatenate(ages), kind="stable")
        return self._aged[2]

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes what the folder does not hold yet, a file for each added episode, and returns what `load` needs
        besides: plain data for a checkpoint. Files are never deleted here, since an earlier checkpoint may need them:
        see `prune`."""
        if self._written is None or self._written[0] != folder:
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
        """The replay as it was when `save` returned `state`. Raises InputError naming a file that is missing or
        damaged."""
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
    """Deletes the files that none of the states (of `save`) needs."""
    needed = {_file_name(number) for state in states for number, _, _ in state["pieces"]}
    for path in folder.glob("*.npz"):
        if path.name not in needed:
            path.unlink()


def _file_name(number: int) -> str:
    return f"{number:08d}.npz"


def _episode(
    space: FrameSpace, row: tuple[NDArray[Any], ...], steps: NDArray[np.int64], policy: str, seed: int
) -> FrameEpisode:
    """Consecutive steps of a row of segments, whose fields come in the order of Segments."""
    obs, next_obs, *results, _, lost = row
    frames = np.concatenate((obs[steps], next_obs[steps[-1:]]))
    action, reward, terminated, truncated = (column[steps] for column in results)
    extras = {LOST: np.concatenate(([False], lost[steps]))} if lost[steps].any() else {}
    return FrameEpisode(space, frames, action, reward, terminated, truncated, seed, policy, extras)


def _in_parts(
    drawn: NDArray[np.float64], count: int, shares: Sequence[float], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Of `count` things numbers drawn part by part; drawn: where in its part each is, in 0 to 1."""
    part = generator.choice(len(shares), size=len(drawn), p=shares)
    return ((part + drawn) / len(shares) * count).astype(np.int64)


def _row(stream: _Stream, start: int, length: int) -> tuple[NDArray[Any], ...]:
    return tuple(map(np.concatenate, zip(*stream.cuts(start, length), strict=True)))
