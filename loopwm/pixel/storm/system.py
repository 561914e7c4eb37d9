"""STORM as a pixel system: its losses, and a world that steps in latents and decodes frames on demand.

Losses (STORM, section 3.1): reconstruction, reward and continuation, and with kl(p, q) summed over groups

    0.5 max(free, kl(sg q(z_{t+1}), p(. | h_t))) + 0.1 max(free, kl(q(z_{t+1}), sg p(. | h_t)))

Free bits apply to the mean over the batch, and an episode's first frame is no target. An autoregressive prior
conditions on the earlier groups as sampled from q: the first term is then unbiased, and the second ignores the effect
of a group's sample on later groups.

Shape suffixes: B batch, T environment steps, G groups, K classes of a group, D width, P past steps, H/W/C frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.twohot import two_hot_loss, two_hot_value
from loopwm.pixel.dynamics import Depth, FrameCache, as_pixels, masked_mean, require_at_least
from loopwm.pixel.imagined import Imagined, LatentWorld
from loopwm.pixel.storm.model import Storm, StormConfig, kl_divergence, mode, sample_latents
from loopwm.pixel.system import Diagnostics, FrameBatch, PixelSystem, mean_of
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace


@dataclass(frozen=True)
class StormObjective:
    """Coefficients of the loss (STORM, section 3.1). Raises ValueError if a value is out of range."""

    dynamics_coef: float = 0.5
    representation_coef: float = 0.1
    free_bits: float = 1.0
    """Free bits: nats per step below which a KL term has no gradient; must be below the usual KL of a step of the game.
    """

    def __post_init__(self) -> None:
        require_at_least(0, self, *(field.name for field in fields(self)))


LATENTS = {"sample": sample_latents, "mode": mode}


@dataclass(frozen=True)
class StormSampling:
    latents: Literal["sample", "mode"] = "sample"
    """mode: the most likely class of each group, a deterministic imagination."""


class StormSystem(PixelSystem):
    name = "storm"
    Model, Objective, Sampling = StormConfig, StormObjective, StormSampling
    reads_following = False

    def __init__(self, config: StormConfig, objective: StormObjective, space: FrameSpace) -> None:
        super().__init__(config, objective, space)
        most = config.groups * math.log(config.classes)
        if objective.free_bits > most:
            raise InputError(f"objective.free_bits: must be at most {most:.4g} nats, got {objective.free_bits}")
        self.network = Storm(config, space)
        self.width = config.groups * config.classes + config.dim

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """Compute the loss. Raises InputError if the segments are longer than the learned positions."""
        c, network, steps = self.objective, self.network, batch.action.shape[1]
        if steps > self.config.positions:
            raise InputError(f"steps: segments must be at most model.positions ({self.config.positions}), got {steps}")
        posterior = network.encode(batch.obs)
        z = sample_latents(posterior, generator)
        pixels = network.images.compare(network.decode(z), as_pixels(batch.obs)).mean()
        places = torch.arange(steps, device=z.device).expand_as(batch.action)
        out = network.run(network.mix(z, batch.action), places, batch.first, depth)
        predicted = network.predict(out.h)
        reward = two_hot_loss(predicted.reward, batch.reward).mean()
        end = F.binary_cross_entropy_with_logits(predicted.end, batch.terminated.float())
        follows, targets = ~batch.first[:, 1:], posterior[:, 1:]  # a first frame follows no step
        prior = network.prior(out.h[:, :-1], z[:, 1:].detach())  # conditions later groups; no target
        # Each KL term trains one side only: the stop-gradient is on the other.
        dynamics = masked_mean(kl_divergence(targets.detach(), prior), follows)
        representation = masked_mean(kl_divergence(targets, prior.detach()), follows)
        loss = pixels + reward + end
        loss = loss + c.dynamics_coef * dynamics.clamp(min=c.free_bits)
        loss = loss + c.representation_coef * representation.clamp(min=c.free_bits)
        entropy = -(posterior.exp() * posterior).sum((-2, -1)).mean()
        means = {"loss": loss, "reconstruction": pixels, "reward_loss": reward, "done_loss": end, "kl": dynamics}
        means |= {"posterior_entropy": entropy, "mean_depth": out.loops.float().mean()}
        return loss, {name: mean_of(mean, batch.action.numel()) for name, mean in means.items()}

    def world(self, sampling: StormSampling | None = None) -> StormWorld:
        return StormWorld(self, self.sampling if sampling is None else sampling)


@dataclass(frozen=True)
class StormState:
    """State of worlds.

    z: latents of the current frame, (B, G, K)
    h: output of the step before, (B, D); zeros at an episode's beginning
    first: bool (B,), True at an episode's beginning
    frames: steps before, the position of the next step, (B,)
    longest: maximum of `frames`
    past: last e, (B, P, D), left-padded; P is an agent's context without the current frame
    past_first: bool (B, P), True where a past step began an episode
    cache: sequence-model state of the steps before
    """

    z: Tensor
    h: Tensor
    first: Tensor
    frames: Tensor
    longest: int
    past: Tensor
    past_first: Tensor
    cache: FrameCache

    def at_beginning(self, first: Tensor) -> StormState:
        """Mark rows whose frame begins an episode, first: bool (B,)."""
        return replace(self, first=first, h=self.h.masked_fill(first[:, None], 0))


class StormWorld(LatentWorld[StormState]):
    """World whose policies act on [z_t, h_{t-1}]."""

    def __init__(self, system: StormSystem, sampling: StormSampling) -> None:
        """Create the world. Raises ValueError if the model does not allow the depth."""
        self.system, self.network, self.space = system, system.network, system.space
        self.width, self._choose = system.width, LATENTS[sampling.latents]
        self.depth = system.config.default_depth

    @torch.no_grad()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> StormState:
        """Return the state after a context of frames. Raises InputError for more than learned positions."""
        (batch, steps), c = first.shape, self.system.config
        if steps > c.positions:
            raise InputError(f"context: must be at most model.positions ({c.positions}) frames, got {steps}")
        z = self._posterior(obs, generator)
        empty = StormState(
            z=z[:, -1],
            h=z.new_zeros(batch, c.dim),
            first=first[:, -1],
            frames=torch.zeros(batch, dtype=torch.long, device=z.device),
            longest=0,
            past=z.new_zeros(batch, c.context - 1, c.dim),
            past_first=torch.zeros(batch, c.context - 1, dtype=torch.bool, device=z.device),
            cache=self.network.dynamics.initial(batch, z.device),
        )
        if steps == 1:
            return empty
        e = self.network.mix(z[:, :-1], action)
        return self._after(empty, e, first[:, :-1]).at_beginning(first[:, -1])

    @torch.no_grad()
    def observe(
        self, state: StormState, action: Tensor, obs: Tensor, first: Tensor, generator: torch.Generator
    ) -> StormState:
        """Return the state after one more real frame.

        Only the last `context` frames count, this one included, as for `start` (STORM, table 9).
        """
        e = self.network.mix(state.z, action)
        past = self._rebuild_cache(self._append_past(state, e[:, None], state.first[:, None]))
        return replace(past, z=self._posterior(obs, generator)).at_beginning(first)

    @torch.no_grad()
    def step(self, state: StormState, action: Tensor, generator: torch.Generator) -> Imagined[StormState]:
        """Imagine a step; if one row has used up the learned positions, all from the frames that an agent carries."""
        if state.longest >= self.system.config.positions:
            state = self._rebuild_cache(state)
        e = self.network.mix(state.z, action)
        after = self._after(state, e[:, None], state.first[:, None])
        predicted = self.network.predict(after.h)
        end = predicted.end.float().sigmoid()
        terminated = torch.rand(end.shape, generator=generator, device=generator.device).to(end.device) < end
        z = self.network.expect(after.h, self._choose, generator)
        after = replace(after, z=z, first=torch.zeros_like(state.first))
        return Imagined(two_hot_value(predicted.reward), terminated, after)

    @torch.no_grad()
    def show(self, state: StormState) -> Tensor:
        with evaluating(self.network):
            return self.network.images.frames(self.network.decode(state.z))

    def features(self, state: StormState) -> Tensor:
        return torch.cat((state.z.flatten(1), state.h), -1)

    def _posterior(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        with evaluating(self.network):
            return self._choose(self.network.encode(obs), generator)

    def _after(self, at: StormState, e: Tensor, first: Tensor) -> StormState:
        """Return the state after steps of e (B, T, D), first (B, T); the current frame is unchanged."""
        steps = e.shape[1]
        places = at.frames[:, None] + torch.arange(steps, device=e.device)
        out = self.network.run(e, places, first, self.depth, at.cache)
        after = self._append_past(at, e, first)
        return replace(after, h=out.h[:, -1], cache=out.state, longest=at.longest + steps)

    @staticmethod
    def _append_past(at: StormState, e: Tensor, first: Tensor) -> StormState:
        """Append steps (B, T) to the past."""
        length = at.past.shape[1]
        past, past_first = torch.cat((at.past, e), 1)[:, -length:], torch.cat((at.past_first, first), 1)[:, -length:]
        return replace(at, past=past, past_first=past_first, frames=at.frames + e.shape[1])

    def _rebuild_cache(self, at: StormState) -> StormState:
        """Rebuild the cache from the past only, whose oldest step gets position 0."""
        length = at.past.shape[1]
        frames = at.frames.clamp(max=length)
        places = torch.arange(length, device=frames.device) - (length - frames)[:, None]
        out = self.network.run(at.past, places.clamp(min=0), at.past_first | (places == 0), self.depth)
        first = at.first | (frames == 0)  # padding of an empty past must stay masked
        return replace(at, h=out.h[:, -1], first=first, frames=frames, longest=length, cache=out.state)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module in evaluation mode inside the context, with running batch-norm statistics."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
