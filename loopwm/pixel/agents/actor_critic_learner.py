"""Actor-critic learner: acts on frames, or on the features of a latent world that it carries along.

Where the world is a `LatentWorld` and the policy reads vectors, imagination decodes no frame and stays on the device.
Otherwise the policy plays imagined frames like real ones.

Shape suffixes: B environments, T steps, F feature width, Y memory, H/W/C frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.agents.actor_critic import (
    ActorCriticConfig,
    ActorCriticLearner,
    ActorCriticNetwork,
    Experience,
    dream,
)
from loopwm.pixel.agents.learner import Chance, Dream, Numbers, step_means
from loopwm.pixel.dynamics import masked_mean
from loopwm.pixel.imagined import EnvState, FrameWorld, LatentWorld, Rollout, rollout
from loopwm.pixel.replay import as_learned
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

Array = NDArray[Any]


class FrameReader:
    """Policy input: the frame itself."""

    def read(self, action: Tensor | None, obs: Tensor, first: Tensor) -> Tensor:
        return obs

    def read_final(self, action: Tensor, obs: Tensor) -> Tensor:
        return obs


class LatentReader:
    """Policy input: features of a world model that is carried along."""

    def __init__(self, world: LatentWorld[Any], generator: torch.Generator) -> None:
        self._world, self._generator = world, generator
        self._state: Any = None

    def read(self, action: Tensor | None, obs: Tensor, first: Tensor) -> Tensor:
        """Return the input (B, F).

        Args:
            action: (B,), the action that led to obs, None before the first
            obs: frames (B, H, W, C)
            first: bool (B,), True where an episode begins
        """
        if action is None:
            nothing = torch.zeros(len(obs), 0, dtype=torch.long, device=obs.device)
            self._state = self._world.start(obs[:, None], nothing, first[:, None], self._generator)
        else:
            self._state = self._world.observe(self._state, action, obs, first, self._generator)
        return self._world.features(self._state)

    def read_final(self, action: Tensor, obs: Tensor) -> Tensor:
        """Return the input of a frame that truncates an episode, without a change of state."""
        carried = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)
        return self._world.features(self._world.observe(self._state, action, obs, carried, self._generator))


InputReader = FrameReader | LatentReader


class ActorCriticPlayer:
    def __init__(
        self, network: ActorCriticNetwork, reader: InputReader, count: int, generator: torch.Generator
    ) -> None:
        self.network, self._reader, self._generator = network, reader, generator
        self.device = next(network.parameters()).device
        self.memory = network.initial(count, self.device)
        self.action: Tensor | None = None
        self.before: tuple[Tensor, Tensor] | None = None
        """Context inputs (B, K, ...), and True where an episode begins, bool (B, K)."""

    @torch.no_grad()
    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        return self.act(*self.look(obs, first, info))

    def look(self, obs: Array, first: Array, info: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input (B, ...), bool (B,), True where an episode begins, and the memory (B, Y) it begins with.

        Call once per frame: worlds advance at every call.
        """
        if self.action is None and "context_obs" in info:
            return *self._look_back(info), self.network.initial(len(obs), self.device)
        begins = torch.from_numpy(first).to(self.device)
        inputs = self._reader.read(self.action, torch.from_numpy(obs).to(self.device), begins)
        return inputs, begins, self._fresh(first, info)

    def _fresh(self, first: Array, info: dict[str, Any]) -> Tensor:
        """Return the memory (B, Y) of episodes that begin: empty, or after the context frames of an imagined world."""
        fresh, rows = self.network.initial(len(first), self.device), np.flatnonzero(first)
        # Features of another episode's frames would need a state of the world.
        has_frames = "context_obs" in info and isinstance(self._reader, FrameReader)
        if not (len(rows) and has_frames and self.network.config.memory):
            return fresh
        frames, begins = (torch.from_numpy(info[f"context_{name}"][rows]).to(self.device) for name in ("obs", "first"))
        before = frames[:, :-1]
        if before.shape[1]:
            _, warmed = self.network.remember(before, begins[:, :-1], self.network.initial(len(rows), self.device))
            fresh[torch.from_numpy(rows).to(self.device)] = warmed.masked_fill(begins[:, -1:], 0)
        return fresh

    def _look_back(self, info: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Run the context frames of imagined worlds, which begin in the middle of an episode; see `look`."""
        obs, action, first = (
            torch.from_numpy(info[f"context_{name}"]).to(self.device) for name in ("obs", "action", "first")
        )
        inputs = [self._reader.read(None, obs[:, 0], first[:, 0])]
        for t in range(1, first.shape[1]):
            inputs.append(self._reader.read(action[:, t - 1], obs[:, t], first[:, t]))
        self.before = torch.stack(inputs, 1)[:, :-1], first[:, :-1]  # without the current frame
        _, self.memory = self.network.remember(*self.before, self.memory)
        return inputs[-1], first[:, -1]

    def act(self, inputs: Tensor, first: Tensor, fresh: Tensor) -> Array:
        out = self.network.step(inputs, first, self.memory, fresh)
        self.memory = out.memory
        self.action = torch.multinomial(out.logits.float().softmax(-1), 1, generator=self._generator)[:, 0]
        return self.action.cpu().numpy()


@dataclass(frozen=True)
class _Read:
    """Input of a step, memory before it, and memory of an episode that begins.

    cut_value: V of the frame that truncated the step before, (B,)
    """

    inputs: Tensor
    first: Tensor
    memory: Tensor
    fresh: Tensor
    cut_value: Tensor


class RecordingPlayer(ActorCriticPlayer):
    _ahead: _Read | None = None
    _read: tuple[_Read, ...] = ()

    @torch.no_grad()
    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        now, self._ahead = self._ahead or self._reading(obs, first, info), None  # `play` may have read this step ahead
        self._read += (now,)
        return self.act(now.inputs, now.first, now.fresh)

    def _reading(self, obs: Array, first: Array, info: dict[str, Any]) -> _Read:
        cut_value = self._cut_value(obs, info)
        inputs, begins, fresh = self.look(obs, first, info)
        return _Read(inputs, begins, self.memory, fresh, cut_value)

    def _cut_value(self, obs: Array, info: dict[str, Any]) -> Tensor:
        if self.action is None or "final_obs" not in info:
            return torch.zeros(len(obs), device=self.device)
        last = obs.copy()
        for row in np.flatnonzero(info["_final_obs"]):
            last[row] = info["final_obs"][row]
        inputs = self._reader.read_final(self.action, torch.from_numpy(last).to(self.device))
        going = torch.zeros(len(obs), dtype=torch.bool, device=self.device)  # the memory still is that of the episode
        return self.network.value(self.network.step(inputs, going, self.memory).critic)

    @torch.no_grad()
    def play(self, env: VectorEnv[Any, Any, Any], steps: int, env_state: EnvState) -> tuple[Experience, Rollout]:
        """Play on from a state of the environments; return what to learn from and the rollout."""
        self.before = None
        result = rollout(env, self, steps, env_state)
        now = result.env_state
        self._ahead = self._reading(now.obs, now.first, now.info)
        read, self._read = [*self._read, self._ahead], ()
        inputs, first, fresh = (
            torch.stack([getattr(r, name) for r in read], 1) for name in ("inputs", "first", "fresh")
        )
        names = ("action", "reward", "terminated", "truncated")
        segments = as_learned(result.segments)
        results = {name: torch.from_numpy(getattr(segments, name)).to(self.device) for name in names}
        # Train on context frames too: an action may pay for something shown long before imagination began.
        memory, before = read[0].memory, (inputs[:, :0], first[:, :0])
        if self.before is not None:
            memory, before = self.network.initial(len(inputs), self.device), self.before
        return Experience(
            *before,
            memory=memory,
            inputs=inputs,
            first=first,
            fresh=fresh,
            **results,
            final_value=torch.stack([r.cut_value for r in read[1:]], 1),
            valid=torch.ones_like(results["terminated"]),  # ends reset the memory, so later steps count, too
        ), result


class ActorCriticAgent:
    """Actor-critic as `Learner`. Reads frames if `channels` is set, else the world's features."""

    sections: ClassVar[Mapping[str, type]] = {"actor_critic": ActorCriticConfig}

    def __init__(self, config: Any, space: FrameSpace, width: int) -> None:
        """Create network and optimiser. Raises InputError if the agent has neither frames nor features to read."""
        settings: ActorCriticConfig = config.actor_critic
        self._reads_frames = bool(settings.channels)
        if not (self._reads_frames or width):
            raise InputError("actor_critic.channels: must be set, since this agent's world has no features")
        shape = space.frame_shape if self._reads_frames else (width,)
        self.network = ActorCriticNetwork(settings, shape, space.actions)
        self.learner = ActorCriticLearner(self.network, settings)
        self._from_play = settings.from_play
        self._player: ActorCriticPlayer | None = None
        self._played: Experience | None = None

    def _reader(self, world: FrameWorld[Any] | None, generator: torch.Generator) -> InputReader:
        if self._reads_frames:
            return FrameReader()
        if world is None:
            raise InputError("actor_critic.channels: must be set for an agent without a world")
        return LatentReader(cast("LatentWorld[Any]", world), generator)

    def _generator(self, chance: Chance) -> torch.Generator:
        """Create a generator on the network's device."""
        device = next(self.network.parameters()).device
        return torch.Generator(device).manual_seed(int(chance.rng.integers(2**62)))

    def player(self, count: int, generator: torch.Generator, world: FrameWorld[Any] | None) -> ActorCriticPlayer:
        return ActorCriticPlayer(self.network, self._reader(world, generator), count, generator)

    def begin(self, count: int, chance: Chance, world: FrameWorld[Any] | None) -> None:
        generator = self._generator(chance)
        kind = RecordingPlayer if self._from_play else ActorCriticPlayer
        self._player = kind(self.network, self._reader(world, generator), count, generator)

    def play(self, env: VectorEnv[Any, Any, Any], steps: int, env_state: EnvState) -> Rollout:
        if isinstance(self._player, RecordingPlayer):
            self._played, result = self._player.play(env, steps, env_state)
            return result
        assert self._player is not None
        return rollout(env, self._player, steps, env_state)

    def learn_from_play(self, epochs: int, minibatches: int, chance: Chance) -> Numbers:
        """Take one step, since play is on-policy once. Return {} for an agent that learns in imagination only."""
        return {} if self._played is None else self.learner.update(self._played)

    def learn_from_imagination(self, dream_of: Dream, settings: Any, chance: Chance) -> Numbers:
        generator = self._generator(chance)
        if self._reads_frames:
            env_state = EnvState.reset(dream_of.env, int(chance.rng.integers(2**31)))
            player = RecordingPlayer(self.network, FrameReader(), dream_of.env.num_envs, generator)
            data, result = player.play(dream_of.env, settings.steps, env_state)
            return self.learner.update(data) | step_means(result)
        world = cast("LatentWorld[Any]", dream_of.world)
        segments = dream_of.replay.sample(settings.count, settings.burn_in, chance.rng, following=False)
        obs, action, first = (
            torch.from_numpy(x).to(generator.device) for x in (segments.obs, segments.action[:, :-1], segments.first)
        )
        data = dream(world, self.network, world.start(obs, action, first, generator), settings.steps, generator)
        means = {"reward": masked_mean(data.reward, data.valid), "ends": masked_mean(data.terminated, data.valid)}
        return self.learner.update(data) | {name: mean.item() for name, mean in means.items()}

    def to(self, device: torch.device) -> None:
        self.network.to(device)
        self.learner.slow_critic.to(device)

    def state_dict(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state)
