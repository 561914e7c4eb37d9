"""Vector environment that steps a world model, and the rollout loop for policies in imagined or real environments.

Shapes: B worlds, T steps; H, W, C frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.dynamics import replace_rows
from loopwm.pixel.replay import Replay, Segments
from loopwm.records.errors import InputError
from loopwm.records.frames import LOST, FrameSpace

S = TypeVar("S")

Array = NDArray[Any]
Step = tuple[Array, Array, Array, Array, dict[str, Any]]


@dataclass(frozen=True)
class Imagined(Generic[S]):
    """Result of an imagined step. reward: float (B,); terminated: bool (B,); state: state after the step."""

    reward: Tensor
    terminated: Tensor
    state: S


class FrameWorld(Protocol[S]):
    """World model as an environment uses it. Randomness comes from the generators only; states are immutable.

    `show` decodes frames on demand. Worlds whose state contains a feature vector are `LatentWorld`.
    """

    space: FrameSpace
    context: int = 8
    """Frames that are enough to start from in the middle of an episode."""

    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> S:
        """Return the state after a context of frames.

        Args:
            obs: frames uint8 (B, T, H, W, C), the last one current
            action: int64 (B, T - 1)
            first: bool (B, T), True where an episode begins
            generator: source of randomness
        """

    def step(self, state: S, action: Tensor, generator: torch.Generator) -> Imagined[S]:
        """Imagine one step. action: int64 (B,)."""

    def show(self, state: S) -> Tensor:
        """Decode the current frames, uint8 (B, H, W, C)."""

    @torch.no_grad()
    def replace(self, state: S, rows: Tensor, fresh: S) -> S:
        """Return the state with rows int64 (R,) taken from `fresh`, a state of R worlds in that order."""
        return cast("S", replace_rows(state, rows, fresh))


class LatentWorld(FrameWorld[S], Protocol[S]):
    """World with a feature vector that policies can act on without a frame."""

    width: int
    """Feature width F."""

    def observe(self, state: S, action: Tensor, obs: Tensor, first: Tensor, generator: torch.Generator) -> S:
        """Return the state after one more real frame; repeated, it equals `start` on the whole context.

        Args:
            state: state before the frame
            action: int64 (B,), the action that led to `obs`
            obs: frames uint8 (B, H, W, C)
            first: bool (B,), True where an episode begins with `obs` instead
            generator: source of randomness
        """

    def features(self, state: S) -> Tensor:
        """Return the features (B, F)."""


class ImaginedVectorEnv(VectorEnv[Array, Array, Array], Generic[S]):
    """Vector environment of imagined worlds.

    A world that ends restarts in the same step (SAME_STEP), as in gymnasium's SyncVectorEnv, with `final_obs` and
    `final_info`. Worlds start at the end of replay segments of `context` frames and are truncated after `horizon`
    steps. `info` contains the context of each start: context_obs (context, H, W, C), whose last frame is the
    observation, context_action (context - 1,) and context_first (context,), with gymnasium's masks.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        world: FrameWorld[S],
        replay: Replay,
        num_envs: int,
        context: int,
        horizon: int,
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        """Create the environment.

        Raises InputError for a replay of another environment, a count below 1, or an unknown render mode.
        """
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode: must be rgb_array or None, got {render_mode!r}")
        for name, value in (("num_envs", num_envs), ("context", context), ("horizon", horizon)):
            if value < 1:
                raise InputError(f"{name}: must be at least 1, got {value}")
        world.space.require(replay.space, "replay")
        self.num_envs, self.space, self.render_mode = num_envs, world.space, render_mode
        self.single_observation_space = spaces.Box(0, 255, world.space.frame_shape, np.uint8)
        self.single_action_space = spaces.Discrete(world.space.actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._world, self._replay, self._context, self._horizon = world, replay, context, horizon
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device)
        self._state: S | None = None
        self._age = np.zeros(num_envs, dtype=np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start all worlds anew. Raises InputError if the replay has no `context` consecutive steps."""
        super().reset(seed=seed)
        if options:
            raise InputError(f"options: must be none, all worlds begin anew, got {options}")
        if seed is not None or self._state is None:  # else the random state continues, as in Gymnasium
            self._generator.manual_seed(int(self.np_random.integers(2**62)))
        rows = np.arange(self.num_envs)
        infos: dict[str, Any] = {}
        obs, self._state = self._begin(rows, infos)
        self._age[:] = 0
        return obs, infos

    def step(self, actions: Array) -> Step:
        """Step all worlds. actions: (B,). Raises InputError for one outside the space, or before `reset`."""
        actions = np.asarray(actions, dtype=np.int64)
        if self._state is None:
            raise InputError("step: call reset first")
        if actions.shape != (self.num_envs,) or actions.min() < 0 or actions.max() >= self.space.actions:
            raise InputError(
                f"actions: must be {self.num_envs} of 0 to {self.space.actions - 1}, got {actions.tolist()}"
            )
        outcome = self._world.step(self._state, torch.from_numpy(actions).to(self._device), self._generator)
        self._state = outcome.state
        obs, reward = self._world.show(outcome.state).cpu().numpy().copy(), outcome.reward.double().cpu().numpy()
        terminated = outcome.terminated.cpu().numpy()
        self._age += 1
        truncated = ~terminated & (self._age >= self._horizon)
        infos: dict[str, Any] = {}
        over = np.flatnonzero(terminated | truncated)
        if len(over):
            self._restart(over, obs, infos)
        return obs, reward, terminated, truncated, infos

    def render(self) -> tuple[Array, ...] | None:
        """Return the current frames as RGB, None without a render mode or before the first reset."""
        if self.render_mode is None or self._state is None:
            return None
        return tuple(map(painted, self._world.show(self._state).cpu().numpy()))

    def _restart(self, rows: NDArray[np.int64], obs: Array, infos: dict[str, Any]) -> None:
        """Restart the worlds of `rows` and write their frames into obs (B, H, W, C)."""
        assert self._state is not None
        for row in rows:
            self._add_info(infos, {"final_obs": obs[row].copy(), "final_info": {}}, row)
        obs[rows], fresh = self._begin(rows, infos)
        everything = len(rows) == self.num_envs  # spares a join of caches
        at = torch.from_numpy(rows).to(self._device)
        self._state = fresh if everything else self._world.replace(self._state, at, fresh)
        self._age[rows] = 0

    def _begin(self, rows: NDArray[np.int64], infos: dict[str, Any]) -> tuple[Array, S]:
        """Start worlds from replay segments; return their current frames and state."""
        segments = self._replay.sample(len(rows), self._context, self.np_random, following=False)
        actions = segments.action[:, :-1]
        for i, row in enumerate(rows):
            context = {"context_obs": segments.obs[i], "context_action": actions[i], "context_first": segments.first[i]}
            self._add_info(infos, context, row)
        obs, action, first = (torch.from_numpy(x).to(self._device) for x in (segments.obs, actions, segments.first))
        return segments.obs[:, -1], self._world.start(obs, action, first, self._generator)


def painted(frame: Array) -> Array:
    """Convert a frame uint8 (H, W, C) to RGB: one channel to grey, more than three to hues, the brightest on top."""
    channels = frame.shape[2]
    turns = np.arange(channels)[:, None] / channels - np.arange(3) / 3
    colours = np.eye(3) if channels == 3 else np.ones((1, 3)) if channels == 1 else (1 + np.cos(2 * np.pi * turns)) / 2
    return (frame[..., None] * colours).max(2).astype(np.uint8)


class Policy(Protocol):
    """Policy for a vector of environments, with its own memory if it needs one."""

    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        """Return actions int64 (B,).

        Args:
            obs: frames uint8 (B, H, W, C)
            first: bool (B,), True where an episode begins
            info: the environments' info of these observations
        """


class RandomPolicy:
    """Uniformly random actions."""

    def __init__(self, actions: int, generator: np.random.Generator) -> None:
        self._actions, self._generator = actions, generator

    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        return self._generator.integers(self._actions, size=len(obs))


@dataclass(frozen=True)
class EnvState:
    """State of a vector of environments between rollouts: the output of its last reset or step."""

    obs: Array
    first: Array
    info: dict[str, Any]

    @classmethod
    def reset(cls, env: VectorEnv[Any, Any, Any], seed: int | None) -> EnvState:
        """Reset all environments; without a seed they keep their random state."""
        obs, info = env.reset(seed=seed)
        return cls(obs, np.ones(env.num_envs, dtype=bool), info)


@dataclass(frozen=True)
class Rollout:
    """Steps of play.

    segments: T steps of B environments
    env_state: their state after the last step
    endings: the environment's info at each episode's end, by environment and step
    """

    segments: Segments
    env_state: EnvState
    endings: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


def rollout(env: VectorEnv[Any, Any, Any], policy: Policy, steps: int, env_state: EnvState) -> Rollout:
    """Play `steps` steps from a reset or from the state in which another rollout ended.

    Raises ValueError if the autoreset mode of `env` is not SAME_STEP.
    """
    if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise ValueError(f"env: autoreset mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
    rows, endings = [], {}
    for step in range(steps):
        action = policy(env_state.obs, env_state.first, env_state.info)
        obs, reward, terminated, truncated, info = env.step(action)
        over = terminated | truncated
        # SAME_STEP returns the next episode's first frame; the action itself led to `final_obs`.
        next_obs = obs.copy()
        for i in np.flatnonzero(over):
            next_obs[i] = info["final_obs"][i]
            final = info["final_info"]  # a vector's: arrays over environments, with masks
            shown = (name for name in final if not name.startswith("_") and final[f"_{name}"][i])
            endings[int(i), step] = {name: final[name][i] for name in shown}
        results = reward.astype(np.float32), terminated, truncated
        lost = info[LOST].astype(bool) & ~over if LOST in info else np.zeros_like(over)  # an end counts as such
        rows.append((env_state.obs, next_obs, np.asarray(action, np.int64), *results, env_state.first, lost))
        env_state = EnvState(obs, over, info)
    columns = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
    return Rollout(Segments(*columns), env_state, endings)
