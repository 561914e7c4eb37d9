"""STORM as a pixel system: its losses, and a world that is stepped in latents and draws a frame when somebody looks.

Losses (STORM, section 3.1): reconstruction, reward and continuation, and with kl(p, q) summed over groups

    0.5 max(free, kl(sg q(z_{t+1}), p(. | h_t))) + 0.1 max(free, kl(q(z_{t+1}), sg p(. | h_t)))

where the free bits are taken of the mean over the batch, and an episode's first frame is nobody's next. An
autoregressive prior is given the groups before as they were drawn from q: the first term is right in the mean then,
and the second leaves out what a group's draw does to those behind it.

Shape suffixes: B batch, T environment steps, G groups, K classes of a group, D width, P past steps, H/W/C frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.twohot import two_hot_loss, two_hot_value
from loopwm.pixel.dynamics import Depth, DynamicsOutput
from loopwm.pixel.imagined import Imagined
from loopwm.pixel.storm.images import as_pixels
from loopwm.pixel.storm.model import Storm, StormConfig, draw, kl_divergence, mode
from loopwm.pixel.system import Diagnostics, FrameBatch, PixelSystem, mean_of
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace


@dataclass(frozen=True)
class StormObjective:
    """Coefficients (STORM, section 3.1). Raises ValueError for values out of range."""

    dynamics_coef: float = 0.5
    representation_coef: float = 0.1
    free_bits: float = 1.0
    """Nats of a step below which a KL term trains nothing: what a step of a game mostly holds, it must exceed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name}: {getattr(self, field.name)} is below zero")


LATENTS = {"sample": draw, "mode": mode}


@dataclass(frozen=True)
class StormSampling:
    latents: Literal["sample", "mode"] = "sample"
    """mode: the likeliest of each group, an imagination without chance."""
    depth: int = 0
    """Loops of every pass; 0 for the model's."""
    act_on: Literal["posterior", "prior"] = "posterior"
    """Latents that a policy reads in the real environment. prior: of what the frame was expected to be, as the authors'
    code has it, to compare with; where nothing was before it, of the frame."""


class StormSystem(PixelSystem):
    """The network with its losses."""

    name = "storm"
    Model, Objective, Sampling = StormConfig, StormObjective, StormSampling

    def __init__(self, config: StormConfig, objective: StormObjective, space: FrameSpace) -> None:
        super().__init__(config, objective, space)
        most = config.groups * math.log(config.classes)
        if objective.free_bits > most:
            raise InputError(f"objective.free_bits: {objective.free_bits} are more than latents hold, {most:.4g}")
        self.network = Storm(config, space)
        self.width = config.groups * config.classes + config.dim

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """Raises InputError for more steps than there are positions."""
        c, network, steps = self.objective, self.network, batch.action.shape[1]
        if steps > self.config.positions:
            raise InputError(f"steps: segments of {steps} are longer than model.positions, {self.config.positions}")
        posterior = network.encode(batch.obs)
        z = draw(posterior, generator)
        pixels = network.images.compare(network.decode(z), as_pixels(batch.obs)).mean()
        places = torch.arange(steps, device=z.device).expand_as(batch.action)
        out = network.run(network.mix(z, batch.action), places, batch.first, depth)
        predicted = network.predict(out.h)
        reward = two_hot_loss(predicted.reward, batch.reward).mean()
        end = F.binary_cross_entropy_with_logits(predicted.end, batch.terminated.float())
        follows, seen = ~batch.first[:, 1:], posterior[:, 1:]
        prior = network.prior(out.h[:, :-1], z[:, 1:].detach())
        dynamics = masked_mean(kl_divergence(seen.detach(), prior), follows)
        representation = masked_mean(kl_divergence(seen, prior.detach()), follows)
        loss = pixels + reward + end
        loss = loss + c.dynamics_coef * dynamics.clamp(min=c.free_bits)
        loss = loss + c.representation_coef * representation.clamp(min=c.free_bits)
        entropy = -(posterior.exp() * posterior).sum((-2, -1)).mean()
        means = {"loss": loss, "reconstruction": pixels, "reward_loss": reward, "done_loss": end, "kl": dynamics}
        means |= {"posterior_entropy": entropy, "mean_depth": out.loops.float().mean()}
        return loss, {name: mean_of(mean, batch.action.numel()) for name, mean in means.items()}

    def world(self, sampling: StormSampling | None = None) -> StormWorld:
        return StormWorld(self, StormSampling() if sampling is None else sampling)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean where the mask is True, 0 where it is nowhere."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Dreaming:
    """Where worlds stand.

    z: (B, G, K) of the frame now; read: (B, G, K) what a policy reads of it; h: (B, D) of the step before it, zeros
    where there is none in its episode; first: (B,) whether it begins an episode; frames: (B,) steps before it, the
    place of the step to come; longest: the greatest of these; cache: of these steps. past (B, P, D), past_first (B, P):
    the last e and whether they began an episode, padded on the left; P is what an agent carries along, less the frame
    now.
    """

    z: Tensor
    read: Tensor
    h: Tensor
    first: Tensor
    frames: Tensor
    longest: int
    past: Tensor
    past_first: Tensor
    cache: Any

    def begun(self, first: Tensor) -> Dreaming:
        """The same at a frame that begins an episode where first, bool (B,), is True."""
        return replace(self, first=first, h=self.h.masked_fill(first[:, None], 0))

    def replace(self, rows: Tensor, fresh: Dreaming) -> Dreaming:
        """The same with rows int64 (R,) taken from `fresh`, which has R of them in that order."""
        order = torch.arange(len(self.z), device=rows.device)
        order[rows] = len(self.z) + torch.arange(len(rows), device=rows.device)
        tensors = {
            name: torch.cat((getattr(self, name), getattr(fresh, name)))[order]
            for name in ("z", "read", "h", "first", "frames", "past", "past_first")
        }
        cache = self.cache.join(fresh.cache).select(order)
        return Dreaming(**tensors, longest=max(self.longest, fresh.longest), cache=cache)


class StormWorld:
    """A `LatentWorld`: a policy acts on [z_t, h_{t-1}]."""

    def __init__(self, system: StormSystem, sampling: StormSampling) -> None:
        """Raises ValueError for a depth that the model does not allow."""
        self.system, self.network, self.space = system, system.network, system.space
        self.width, self._choose = system.width, LATENTS[sampling.latents]
        self._act_on = sampling.act_on
        self.depth = self.network.dynamics.check(sampling.depth or system.config.default_depth)

    @torch.no_grad()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> Dreaming:
        """Raises InputError for more frames than there are positions."""
        (batch, steps), c = first.shape, self.system.config
        if steps > c.positions:
            raise InputError(f"context: {steps} frames are more than the model's {c.positions} positions")
        z = self._posterior(obs, generator)
        empty = Dreaming(
            z=z[:, -1],
            read=z[:, -1],
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
        return self._expecting(self._after(empty, e, first[:, :-1]).begun(first[:, -1]), generator)

    @torch.no_grad()
    def observe(
        self, state: Dreaming, action: Tensor, obs: Tensor, first: Tensor, generator: torch.Generator
    ) -> Dreaming:
        """The last `context` frames count, this one among them: it equals `start` on these (STORM, table 9)."""
        e = self.network.mix(state.z, action)
        carried = self._recalled(self._noted(state, e[:, None], state.first[:, None]))
        z = self._posterior(obs, generator)
        return self._expecting(replace(carried, z=z, read=z).begun(first), generator)

    @torch.no_grad()
    def step(self, state: Dreaming, action: Tensor, generator: torch.Generator) -> Imagined[Dreaming]:
        """Imagines a step, from the frames that an agent carries where the learned positions are used up."""
        if state.longest >= self.system.config.positions:
            state = self._recalled(state)
        e = self.network.mix(state.z, action)
        after = self._after(state, e[:, None], state.first[:, None])
        predicted = self.network.predict(after.h)
        end = predicted.end.float().sigmoid()
        terminated = torch.rand(end.shape, generator=generator, device=generator.device).to(end.device) < end
        z = self.network.expect(after.h, self._choose, generator)
        after = replace(after, z=z, read=z, first=torch.zeros_like(state.first))
        return Imagined(two_hot_value(predicted.reward), terminated, after)

    @torch.no_grad()
    def show(self, state: Dreaming) -> Tensor:
        with evaluating(self.network):
            return self.network.images.frames(self.network.decode(state.z))

    def features(self, state: Dreaming) -> Tensor:
        return torch.cat((state.read.flatten(1), state.h), -1)

    def replace(self, state: Dreaming, rows: Tensor, fresh: Dreaming) -> Dreaming:
        return state.replace(rows, fresh)

    def _expecting(self, at: Dreaming, generator: torch.Generator) -> Dreaming:
        """The world at a real frame, with what a policy reads of it."""
        if self._act_on == "posterior":
            return at
        expected = self.network.expect(at.h, self._choose, generator)
        return replace(at, read=torch.where(at.first[:, None, None], at.z, expected))

    def _posterior(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        with evaluating(self.network):
            return self._choose(self.network.encode(obs), generator)

    def _after(self, at: Dreaming, e: Tensor, first: Tensor) -> Dreaming:
        """The world after steps of e (B, T, D), first (B, T); what `at` shows is not changed."""
        steps = e.shape[1]
        places = at.frames[:, None] + torch.arange(steps, device=e.device)
        out = self._run(e, places, first, at.cache)
        noted = self._noted(at, e, first)
        return replace(noted, h=out.h[:, -1], cache=out.state, longest=at.longest + steps)

    @staticmethod
    def _noted(at: Dreaming, e: Tensor, first: Tensor) -> Dreaming:
        """The past with these steps (B, T) as its newest."""
        kept = at.past.shape[1]
        past, past_first = torch.cat((at.past, e), 1)[:, -kept:], torch.cat((at.past_first, first), 1)[:, -kept:]
        return replace(at, past=past, past_first=past_first, frames=at.frames + e.shape[1])

    def _recalled(self, at: Dreaming) -> Dreaming:
        """The world with a cache of the past alone, whose oldest step stands at place 0."""
        kept = at.past.shape[1]
        frames = at.frames.clamp(max=kept)
        places = torch.arange(kept, device=frames.device) - (kept - frames)[:, None]
        out = self._run(at.past, places.clamp(min=0), at.past_first | (places == 0))
        first = at.first | (frames == 0)  # nothing before: what pads the past is not seen
        return replace(at, h=out.h[:, -1], first=first, frames=frames, longest=kept, cache=out.state)

    def _run(self, e: Tensor, places: Tensor, first: Tensor, cache: Any = None) -> DynamicsOutput[Any]:
        with evaluating(self.network.dynamics):
            return self.network.run(e, places, first, self.depth, cache)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Batch norm by its moving statistics and no dropout, in a model that may be in training."""
    if not module.training:
        yield
        return
    module.eval()
    try:
        yield
    finally:
        module.train()
