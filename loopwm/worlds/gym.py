"""A Gymnasium environment that is imagined: its step is the world model, the real environment is never run.

import gymnasium, loopwm.worlds.gym  # registers loopwm/ScienceWorld-v0 and loopwm/ALFWorld-v0

envs = gymnasium.make_vec("loopwm/ScienceWorld-v0", num_envs=64, url="http://127.0.0.1:8000")
observations, infos = envs.reset(seed=0, options={"task": "boil"})
observations, rewards, terminations, truncations, infos = envs.step(["open door to kitchen"] * 64)

Without a url the packaged checkpoint runs in this process. `ImaginedTextEnv` takes any worlds and starts.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, Worlds
from loopwm.worlds.starts import ALFWORLD, SCIENCEWORLD, Start, Starts
from loopwm.worlds.starts import read_starts as read_starts

MAX_OBSERVATION = 100_000
MAX_ACTION = 200
"""Most characters of an action."""


class AnyText(spaces.Text):
    """Text of any characters up to a length; samples are words of letters."""

    def __init__(self, max_length: int, min_length: int = 1) -> None:
        super().__init__(max_length, min_length=min_length, charset=string.ascii_letters)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length


def step_info(imagined: Imagined) -> dict[str, Any]:
    predicted = {"continuation": imagined.continuation, "finish": imagined.finish, "trust": imagined.trust}
    return {"predicted": imagined.reward is not None, **predicted}


class ImaginedTextEnv(gymnasium.Env[str, str]):
    """Observations and actions are texts; rewards are score differences in points, as far as the model predicts them.

    An episode starts in one of `starts`, drawn with the seed of `reset`, of the "task" or "family" that `options` name,
    or in `options["context"]`. It terminates where the predicted chance to go on falls below one half, and is truncated
    after `max_steps` or where the world would grow over the model's limit (the last observation then stands again).
    Without prediction heads rewards are 0 and nothing terminates; `info["predicted"]` tells. `info` also has the goal,
    and after a step the `continuation`, how the observation ended (`finish`) and its `trust`.
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - the base class declares it so

    def __init__(
        self,
        worlds: Worlds,
        starts: Sequence[Context | Start] | Starts,
        max_steps: int = 50,
        render_mode: str | None = None,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps: must be above 0, got {max_steps}")
        self.observation_space = AnyText(MAX_OBSERVATION, min_length=0)
        self.action_space = AnyText(MAX_ACTION)
        self.render_mode = render_mode
        self._worlds, self._max_steps = worlds, max_steps
        self._starts = starts if isinstance(starts, Starts) else Starts(starts)
        self._observation, self._steps, self._over = "", 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        options: {"context": Context} is the start; "task" or "family" restricts the draw. Raises FormatError for one
        without a start.
        """
        super().reset(seed=seed)
        start = self._starts.draw(self.np_random, options or {})
        self._worlds.begin([start.context])
        self._observation = start.observation
        self._steps, self._over = 0, False
        return self._observation, start.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Imagine a step. Raises ValueError for an action outside the space, or without an episode."""
        if self._over:
            raise ValueError("step: must follow reset; the episode has ended or not begun")
        if not self.action_space.contains(action) or not action.strip():
            raise ValueError(f"action: must be a text of 1 to {MAX_ACTION} characters, got {action!r}")
        (imagined,) = self._worlds.step([action])
        full, terminated = imagined.finish == "full", imagined.ends
        self._steps += 1
        self._observation = self._observation if full else imagined.observation
        truncated = full or (not terminated and self._steps >= self._max_steps)
        self._over = terminated or truncated
        return self._observation, imagined.reward or 0.0, terminated, truncated, step_info(imagined)

    def render(self) -> str | None:
        return self._observation if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._worlds.close()


for _name, _starts in (("ScienceWorld", SCIENCEWORLD), ("ALFWorld", ALFWORLD)):
    gymnasium.register(
        f"loopwm/{_name}-v0",
        entry_point="loopwm.worlds.vector:make_env",
        vector_entry_point="loopwm.worlds.vector:make_vector_env",
        kwargs={"starts": _starts},
    )
