"""Craftax (130 x 110 pixels) and Craftax-classic (63 x 63, as Crafter).

JAX compiles the first step, for a minute or more; on a CPU later ones are slow too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, Simulator, installed
from loopwm.records.frames import FrameSpace


class Craftax(Simulator):
    """One world. Infos: `achievements` reached in the episode so far (bool)."""

    def __init__(self, classic: bool) -> None:
        import jax
        from craftax.craftax_env import make_craftax_env_from_name

        name = "Craftax-Classic-Pixels-v1" if classic else "Craftax-Pixels-v1"
        env = make_craftax_env_from_name(name, auto_reset=False)
        self._jax, self._params = jax, env.default_params
        self._reset, self._step = jax.jit(env.reset), jax.jit(env.step)
        self._key: Any = None
        self._state: Any = None
        env_name = "craftax-classic" if classic else "craftax"
        shape = tuple(env.observation_space(self._params).shape)
        self.space = FrameSpace(env_name, installed("craftax"), shape, env.num_actions)

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._key = self._jax.random.PRNGKey(seed)
        pixels, self._state = self._reset(self._next_key(), self._params)
        return _frame(pixels), self._info()

    def act(self, action: int) -> Outcome:
        pixels, self._state, reward, over, _ = self._step(self._next_key(), self._state, action, self._params)
        out_of_time = bool(over) and int(self._state.timestep) >= self._params.max_timesteps
        return Outcome(_frame(pixels), float(reward), bool(over) and not out_of_time, out_of_time, self._info())

    def _next_key(self) -> Any:
        self._key, key = self._jax.random.split(self._key)
        return key

    def _info(self) -> dict[str, Any]:
        return {"achievements": np.asarray(self._state.achievements)}


def _frame(pixels: Any) -> Frame:
    return np.rint(255 * np.asarray(pixels)).astype(np.uint8)
