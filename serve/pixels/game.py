"""Game that one keyboard plays twice: in the simulator and in a world model of it.

Shapes: H, W, C frame; Y, X cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwm.pixel.imagined import FrameWorld
from loopwm.records.frames import FrameEpisode

Array = NDArray[Any]

CONTEXT = 8
"""Real frames that an imagined world is forked from."""
CELLS = 16
"""Maximum cells of a frame's longer side."""
TOLERANCE = 32
"""Mean difference of a cell's pixels, of 255, from which it differs."""


@dataclass(frozen=True)
class View:
    """One side of the game: the frame (H, W, C), the return so far, and True if the episode is over or truncated."""

    frame: Array
    score: float = 0.0
    over: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class Moment:
    """Both sides after an action, None at the beginning. real: None without a simulator; state: the world's."""

    action: int | None
    real: View | None
    imagined: View
    state: Any

    @property
    def sides(self) -> dict[str, View]:
        """Return the sides by name, the real one first."""
        return ({} if self.real is None else {"real": self.real}) | {"imagined": self.imagined}

    @property
    def over(self) -> bool:
        """Return True if the real episode is over, or the imagined one without a simulator."""
        leading = self.real or self.imagined
        return leading.over or leading.truncated

    @property
    def cells(self) -> NDArray[np.bool_]:
        """Return the cells (Y, X) in which the sides differ."""
        return differing(self.real.frame, self.imagined.frame) if self.real else np.zeros((0, 0), dtype=bool)

    @property
    def diverged(self) -> bool:
        """Return True if a cell differs, or one side has ended and the other has not."""
        if self.real is None:
            return False
        return bool(self.cells.any()) or (self.real.over != self.imagined.over and not self.real.truncated)


def cell_size(height: int, width: int) -> int:
    """Return the side of a cell in pixels."""
    return -(-max(height, width) // CELLS)


def differing(real: Array, imagined: Array) -> NDArray[np.bool_]:
    """Mark the cells (Y, X) in which two frames (H, W, C) differ; those at the edges may be smaller."""
    distance = np.abs(real.astype(float) - imagined).max(2)
    height, width = distance.shape
    size = cell_size(height, width)
    padded = np.pad(distance, ((0, -height % size), (0, -width % size)), constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // size, size, padded.shape[1] // size, size)
    marks: NDArray[np.bool_] = np.nanmean(blocks, axis=(1, 3)) >= TOLERANCE
    return marks


class Game:
    """Episodes played on both sides with the same actions.

    Randomness of the world comes from `seed`, and so do the simulator's episodes.
    """

    def __init__(self, world: FrameWorld[Any], env: Any, starts: Sequence[FrameEpisode], seed: int) -> None:
        """Begin the first episode.

        Args:
            world: world model
            env: Gymnasium environment of the simulator, or None
            starts: recorded episodes, in whose first frames a world without a simulator begins
            seed: of all randomness
        """
        self._world, self._env, self._starts, self._seed = world, env, starts, seed
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.episodes, self.steps, self.diverged = 0, 0, 0
        self.restart()

    @property
    def now(self) -> Moment:
        return self._moments[-1]

    @property
    def age(self) -> int:
        """Return the number of steps in this episode."""
        return len(self._moments) - 1

    @property
    def status(self) -> str:
        """Return lines for the player: returns, differences now, and of all steps so far."""
        returns = (
            f"{name} {round(view.score, 2) + 0.0:.2f}{' over' * view.over}" for name, view in self.now.sides.items()
        )
        lines = [f"step {self.age}", *returns]
        if self.now.real is not None:
            lines += [f"cells that differ: {self.now.cells.sum()}", f"diverged: {self.diverged} of {self.steps} steps"]
        return "\n".join(lines)

    def restart(self) -> None:
        """Begin the next episode."""
        self.episodes += 1
        if self._env is None:
            frame = self._starts[int(self._rng.integers(len(self._starts)))].obs[0]
        else:
            frame = self._env.reset(seed=self._seed + self.episodes)[0]
        state = self._start([frame], [], begins=True)
        self._moments = [Moment(None, View(frame) if self._env else None, self._view(state), state)]

    def act(self, action: int) -> None:
        """Take an action on both sides; after an end, begin the next episode instead. A side that is over stays."""
        before = self.now
        if before.over:
            self.restart()
            return
        real, imagined, state = before.real, before.imagined, before.state
        if real is not None:
            frame, reward, over, truncated, _ = self._env.step(np.int64(action))
            real = View(frame, real.score + float(reward), over, truncated)
        if not imagined.over:
            outcome = self._world.step(state, torch.tensor([action]), self._generator)
            state = outcome.state
            imagined = self._view(state, imagined.score + outcome.reward.item(), bool(outcome.terminated))
        self._moments.append(Moment(action, real, imagined, state))
        self.steps += 1
        self.diverged += self.now.diverged

    def act_randomly(self) -> None:
        self.act(int(self._rng.integers(self._world.space.actions)))

    def back(self) -> None:
        """Take back the last step; the simulator, which only goes forward, replays the episode up to there.

        The next imagined step is drawn anew, so another outcome may follow.
        """
        if not self.age:
            return
        self._moments.pop()
        if self._env is not None:
            self._env.reset(seed=self._seed + self.episodes)
            for moment in self._moments[1:]:
                self._env.step(np.int64(moment.action or 0))

    def fork(self) -> None:
        """Start the imagined world again from the last real frames; without a simulator nothing changes."""
        if self._env is None:
            return
        recent = self._moments[-CONTEXT:]
        frames = [moment.real.frame for moment in recent if moment.real]
        actions = [moment.action or 0 for moment in recent[1:]]
        state = self._start(frames, actions, begins=len(recent) == len(self._moments))
        real = self.now.real
        assert real is not None
        self._moments[-1] = Moment(self.now.action, real, self._view(state, real.score, real.over), state)

    def _start(self, frames: Sequence[Array], actions: Sequence[int], begins: bool) -> Any:
        """Return the world's state after frames. begins: True if the first one begins the episode."""
        first = torch.zeros(1, len(frames), dtype=torch.bool)
        first[0, 0] = begins
        obs, action = torch.from_numpy(np.stack(frames)[None]), torch.tensor([[*actions]], dtype=torch.int64)
        return self._world.start(obs, action, first, self._generator)

    def _view(self, state: Any, score: float = 0.0, over: bool = False) -> View:
        return View(self._world.show(state)[0].numpy(), score, over)
