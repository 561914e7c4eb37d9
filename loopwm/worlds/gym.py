"""A Gymnasium environment that is imagined: its step is the world model, the real environment is never run.

import gymnasium, loopwm.worlds.gym  # registers loopwm/ScienceWorld-v0 and loopwm/ALFWorld-v0

envs = gymnasium.make_vec("loopwm/ScienceWorld-v0", num_envs=64, url="http://127.0.0.1:8000")
observations, infos = envs.reset(seed=0, options={"task": "boil"})
observations, rewards, terminations, truncations, infos = envs.step(["open door to kitchen"] * 64)

Without a url the packaged checkpoint runs in this process. `ImaginedTextEnv` takes any worlds and starts, and
`AnchoredTextEnv` a real environment that puts them right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from loopwm.records.template import Context
from loopwm.worlds.anchored import AnchoredWorlds
from loopwm.worlds.protocol import Imagined, Worlds
from loopwm.worlds.spaces import MAX_ACTION, MAX_OBSERVATION, AnyText
from loopwm.worlds.starts import ALFWORLD, SCIENCEWORLD, Source, Start, Starts
from loopwm.worlds.starts import read_starts as read_starts


def step_info(imagined: Imagined) -> dict[str, Any]:
    return {"predicted": imagined.reward is not None, "continuation": imagined.continuation, "finish": imagined.finish}


class ImaginedTextEnv(gymnasium.Env[str, str]):
    """Observations and actions are texts; rewards are score differences in points, as far as the model predicts them.

    An episode starts in one of `starts`, drawn with the seed of `reset`, of the "task" or "family" that `options` name,
    or in `options["context"]`. It terminates where the predicted chance to go on falls below one half, and is truncated
    after `max_steps` or where the world would grow over the model's limit (the last observation then stands again).
    Without prediction heads rewards are 0 and nothing terminates; `info["predicted"]` tells. `info` also has the goal,
    and after a step the `continuation` and how the observation ended (`finish`).
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - the base class declares it so

    def __init__(
        self,
        worlds: Worlds,
        starts: Sequence[Context | Start] | Source,
        max_steps: int = 50,
        render_mode: str | None = None,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps: must be above 0, got {max_steps}")
        self.observation_space = AnyText(MAX_OBSERVATION, min_length=0)
        self.action_space = AnyText(MAX_ACTION)
        self.render_mode = render_mode
        self._worlds, self._max_steps = worlds, max_steps
        self._starts: Source = Starts(starts) if isinstance(starts, Sequence) else starts
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


ADMISSIBLE = ("admissible", "admissible_commands", "valid")
"""Keys of a real environment's infos with the admissible actions."""


class RealEnv:
    """A real environment whose episodes are also the imagined ones.

    Its infos contain the goal and, if known, the task, its family, and admissible actions.
    """

    def __init__(self, real: str | gymnasium.Env[str, str]) -> None:
        """Wrap an environment, or make it from its Gymnasium id."""
        self._env = gymnasium.make(real, disable_env_checker=True) if isinstance(real, str) else real
        self._info: Mapping[str, Any] = {}

    def draw(self, random: np.random.Generator, options: Mapping[str, Any]) -> Start:
        """Reset to an episode and return its start. Raises ValueError if the infos have no goal."""
        observation, self._info = self._env.reset(seed=int(random.integers(2**31)), options=dict(options))
        info = self._info
        if "goal" not in info:
            raise ValueError("real: must have the goal in the infos of its reset")
        return Start(Context(info["goal"], observation), info.get("task"), info.get("family"))

    def step(self, action: str) -> tuple[str, Any, bool, bool, Mapping[str, Any]]:
        answer = self._env.step(action)
        self._info = answer[4]
        return answer

    @property
    def admissible(self) -> tuple[str, ...] | None:
        """Return the admissible actions, None if the infos lack them."""
        return next((tuple(self._info[name]) for name in ADMISSIBLE if name in self._info), None)

    def close(self) -> None:
        self._env.close()


class AnchoredTextEnv(ImaginedTextEnv):
    """An imagined environment that steps a real one every few steps, and when it imagines the end.

    Observation, reward and end of such a step are real and replace the imagined steps before. `info["real"]` marks such
    steps; `info["admissible"]` has the admissible actions then, None at imagined steps.
    """

    def __init__(
        self,
        worlds: Worlds,
        real: str | gymnasium.Env[str, str],
        every: int = 5,
        max_steps: int = 50,
        render_mode: str | None = None,
    ) -> None:
        """Anchor worlds to a real environment. every: steps between real results; with 1 every result is real."""
        self._real = RealEnv(real)
        self._anchored = AnchoredWorlds(worlds, [self._real], every)
        super().__init__(self._anchored, self._real, max_steps, render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset both. options: the real environment's."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, **self._told()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        predicted = info["predicted"] and not self._anchored.real
        return observation, reward, terminated, truncated, {**info, "predicted": predicted, **self._told()}

    def close(self) -> None:
        super().close()
        self._real.close()

    def _told(self) -> dict[str, Any]:
        real = self._anchored.real
        return {"real": real, "admissible": self._real.admissible if real else None}


for _name, _starts in {"ScienceWorld": SCIENCEWORLD, "ALFWorld": ALFWORLD}.items():
    gymnasium.register(
        f"loopwm/{_name}-v0",
        entry_point="loopwm.worlds.vector:make_env",
        vector_entry_point="loopwm.worlds.vector:make_vector_env",
        kwargs={"starts": _starts},
    )
