"""Game that one keyboard plays twice: in the simulator and in a world model of it.

Shapes: H, W, C frame; Y, X cells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwm.pixel.imagined import FrameWorld
from loopwm.records.frames import FrameEpisode

Array = NDArray[Any]

CONTEXT = 8
"""Real frames that an imagined world is forked from."""
HISTORY = 200
"""Steps that can be taken back: a state of a large world takes a megabyte."""
CELLS = 16
"""Maximum cells of a frame's longer side."""
TOLERANCE = 32
"""Mean difference of a cell's pixels, of 255, from which it differs."""


@dataclass(frozen=True)
class View:
    """One side of the game: the frame (H, W, C), the return so far, and how the episode ended, if it did."""

    frame: Array
    score: float = 0.0
    over: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class Moment:
    """Both sides after a step. real: None without a simulator; state: the world's."""

    real: View | None
    imagined: View
    state: Any = field(repr=False)

    @property
    def sides(self) -> dict[str, View]:
        """Return the sides by name, the real one first."""
        return ({} if self.real is None else {"real": self.real}) | {"imagined": self.imagined}

    @property
    def cells(self) -> NDArray[np.bool_]:
        """Return the cells (Y, X) in which the sides differ."""
        return differing(*(view.frame for view in (self.real or self.imagined, self.imagined)))

    @property
    def diverged(self) -> bool:
        """Return True if a cell differs, or one side has ended and the other has not."""
        real = self.real or self.imagined
        return bool(self.cells.any()) or (real.over != self.imagined.over and not real.truncated)


def cell_size(frame: Array) -> int:
    """Return the side of a cell in pixels."""
    return -(-max(frame.shape[:2]) // CELLS)


def differing(real: Array, imagined: Array) -> NDArray[np.bool_]:
    """Mark the cells (Y, X) in which two frames (H, W, C) differ; those at the edges may be smaller."""
    distance, size = np.abs(real.astype(float) - imagined).max(2), cell_size(real)
    rows, columns = (range(0, side, size) for side in distance.shape)
    return np.array([[distance[y : y + size, x : x + size].mean() >= TOLERANCE for x in columns] for y in rows])


class Game:
    """Episodes played on both sides with the same actions."""

    def __init__(self, world: FrameWorld[Any], env: Any, starts: Sequence[FrameEpisode], seed: int) -> None:
        """Begin the first episode.

        env: simulator, or None: a world then begins in the first frames of `starts`. seed: of all randomness.
        """
        self._world, self._env, self._starts, self._seed = world, env, starts, seed
        self._rng, self._generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.episodes, self.steps, self.diverged = 0, 0, 0
        self.restart()

    @property
    def now(self) -> Moment:
        return self._moments[-1]

    @property
    def age(self) -> int:
        """Return the number of steps in this episode."""
        return len(self._actions)

    @property
    def status(self) -> str:
        """Return lines for the player: returns, differences now, and of all steps so far."""
        lines = [f"step {self.age}"]
        for name, view in self.now.sides.items():
            score = round(view.score, 2) + 0.0  # not -0
            lines.append(f"{name} {score:.2f}{' over' * view.over}")
        if self._env is not None:
            lines += [f"cells that differ: {self.now.cells.sum()}", f"diverged: {self.diverged} of {self.steps} steps"]
        return "\n".join(lines)

    def restart(self) -> None:
        """Begin the next episode."""
        self.episodes += 1
        self._actions: list[int] = []
        if self._env is not None:
            frame = self._env.reset(seed=self._seed + self.episodes)[0]
        else:
            frame = self._starts[int(self._rng.integers(len(self._starts)))].obs[0]
        state = self._start([frame], [])
        moment = Moment(None if self._env is None else View(frame), self._view(state), state)
        self._moments = deque([moment], HISTORY + 1)

    def act(self, action: int) -> None:
        """Take an action on both sides; after the leading side's end, begin the next episode instead.

        The real side leads if there is one. An imagined side that is over stays as it is.
        """
        real, imagined, state = self.now.real, self.now.imagined, self.now.state
        leading = real or imagined
        if leading.over or leading.truncated:
            self.restart()
            return
        if real is not None:
            frame, reward, over, truncated, _ = self._env.step(np.int64(action))
            real = View(frame, real.score + float(reward), over, truncated)
        if not imagined.over:
            outcome = self._world.step(state, torch.tensor([action]), self._generator)
            state = outcome.state
            imagined = self._view(state, imagined.score + outcome.reward.item(), bool(outcome.terminated))
        self._actions.append(action)
        self._moments.append(Moment(real, imagined, state))
        self.steps += 1
        self.diverged += self.now.diverged

    def act_randomly(self) -> None:
        self.act(int(self._rng.integers(self._world.space.actions)))

    def back(self) -> None:
        """Take back the last step; the simulator, which only goes forward, replays the episode up to there.

        The next imagined step is sampled again, so another outcome may follow.
        """
        if len(self._moments) == 1:
            return
        self._moments.pop()
        self._actions.pop()
        if self._env is not None:
            self._env.reset(seed=self._seed + self.episodes)
            for action in self._actions:
                self._env.step(np.int64(action))

    def fork(self) -> None:
        """Start the imagined world again from the last real frames; without a simulator nothing changes."""
        recent = [moment.real for moment in self._moments if moment.real is not None][-CONTEXT:]
        if recent:
            actions = self._actions[self.age + 1 - len(recent) :]  # one less than frames
            state = self._start([view.frame for view in recent], actions)
            self._moments[-1] = Moment(recent[-1], self._view(state, recent[-1].score, recent[-1].over), state)

    def _start(self, frames: Sequence[Array], actions: Sequence[int]) -> Any:
        """Return the world's state after the last frames of the episode and the actions between them."""
        first = torch.zeros(1, len(frames), dtype=torch.bool)
        first[0, 0] = len(frames) == self.age + 1
        obs, action = torch.from_numpy(np.stack(frames)[None]), torch.tensor([actions], dtype=torch.int64)
        return self._world.start(obs, action, first, self._generator)

    def _view(self, state: Any, score: float = 0.0, over: bool = False) -> View:
        return View(self._world.show(state)[0].numpy(), score, over)
