"""Game that one keyboard plays twice: in the simulator and in a world model of it.

Shapes: H, W, C frame; Y, X cells.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwm.pixel.imagined import FrameWorld, painted
from loopwm.records.frames import FrameEpisode

Array = NDArray[Any]

HISTORY = 200
"""Steps that can be taken back: a state of a large world takes a megabyte."""
CELLS = 16
"""Maximum cells of a frame's longer side."""
TOLERANCE = 32
"""Mean difference of a cell's pixels, of 255, from which it differs."""
FUTURES, HORIZON, FOLLOWED = 64, 12, 4
"""Futures that the agent imagines, their steps, and those of the best one that it takes before it imagines again."""
SURVIVAL = 0.01
"""Worth of a step before an imagined end: without it, most futures without a reward would be equal."""


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

    def json(self) -> dict[str, Any]:
        """Return counts, cells [row, column] that differ, and each side with its pixels, RGB in base64."""
        sides = {
            name: {
                "rgb": b64encode(painted(view.frame).tobytes()).decode(),
                "score": view.score,
                "over": view.over or view.truncated,
            }
            for name, view in self.now.sides.items()
        }
        (height, width, _), size = self.now.imagined.frame.shape, cell_size(self.now.imagined.frame)
        frame = {"height": height, "width": width, "cell_size": size, "cells": np.argwhere(self.now.cells).tolist()}
        counts = {"episode": self.episodes, "step": self.age, "steps": self.steps, "diverged": self.diverged}
        return {**counts, **frame, "sides": sides}

    def restart(self) -> None:
        """Begin the next episode."""
        self.episodes += 1
        self._actions: list[int] = []
        self._plan: list[int] = []  # the agent's next actions
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
        real, imagined, state, self._plan = self.now.real, self.now.imagined, self.now.state, []
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

    def act_by_plan(self) -> None:
        """Take the agent's action: of the future that pays most, of some that are imagined from the last frames."""
        action, *following = self._plan or self._best_future()[:FOLLOWED]
        self.act(action)
        self._plan = following if self.age else []  # the action may have begun the next episode

    def _best_future(self) -> list[int]:
        """Return the actions that pay most, of random ones."""
        actions = torch.randint(self._world.space.actions, (HORIZON, FUTURES), generator=self._generator)
        state, worth, alive = self._start(*self._recent(), FUTURES), torch.zeros(FUTURES), torch.ones(FUTURES)
        for action in actions:
            outcome = self._world.step(state, action, self._generator)
            state, worth = outcome.state, worth + alive * (outcome.reward + SURVIVAL)
            alive = alive * ~outcome.terminated
            if not alive.any():
                break
        return actions[:, worth.argmax()].tolist()

    def back(self) -> None:
        """Take back the last step; the simulator, which only goes forward, replays the episode up to there.

        The next imagined step is sampled again, so another outcome may follow.
        """
        if len(self._moments) == 1:
            return
        self._moments.pop()
        self._actions.pop()
        self._plan = []
        if self._env is not None:
            self._env.reset(seed=self._seed + self.episodes)
            for action in self._actions:
                self._env.step(np.int64(action))

    def fork(self) -> None:
        """Start the imagined world again from the last real frames; without a simulator nothing changes."""
        if (real := self.now.real) is not None:
            state = self._start(*self._recent())
            self._moments[-1] = Moment(real, self._view(state, real.score, real.over), state)

    def _recent(self) -> tuple[list[Array], list[int]]:
        """Return the last frames, real ones if there is a simulator, and the actions between them."""
        views = [moment.real or moment.imagined for moment in self._moments][-self._world.context :]
        return [view.frame for view in views], self._actions[self.age + 1 - len(views) :]

    def _start(self, frames: Sequence[Array], actions: Sequence[int], count: int = 1) -> Any:
        """Return the state of `count` worlds after the last frames of the episode and the actions between them."""
        first = torch.zeros(count, len(frames), dtype=torch.bool)
        first[:, 0] = len(frames) == self.age + 1
        obs, action = torch.from_numpy(np.stack(frames)), torch.tensor(actions, dtype=torch.int64)
        return self._world.start(obs.expand(count, *obs.shape), action.expand(count, -1), first, self._generator)

    def _view(self, state: Any, score: float = 0.0, over: bool = False) -> View:
        return View(self._world.show(state)[0].numpy(), score, over)
