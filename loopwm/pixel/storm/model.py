"""STORM's network on the looped core: a frame is one slot of categorical latents.

    z_t ~ q(z_t | o_t)                posterior, from the frame alone          o_t' = p(z_t)
    e_t = m(z_t, a_t)                 action mixer
    h_1 .. h_T = f(e_1 .. e_T)        learned positions, LayerNorm, looped core, LayerNorm
    p(z_{t+1} | h_t)  r_t(h_t)  c_t(h_t)                                       prior, reward, continuation

Departures: the looped core in place of two post-norm layers, so no dropout; heads of rewards and ends begin at zero.

Shape suffixes: B batch, T environment steps, G groups, K classes of a group, D width, A actions, H/W/C frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import CoreConfig
from loopwm.core.twohot import BINS
from loopwm.pixel.agents.actor_critic import mlp
from loopwm.pixel.dynamics import (
    Depth,
    DynamicsOutput,
    LoopedAttention,
    LoopedConfig,
    require_positive_sizes,
)
from loopwm.pixel.storm.images import IMAGES, as_pixels
from loopwm.pixel.storm.prior import PRIORS
from loopwm.pixel.storm.two_layers import TwoLayers
from loopwm.records.frames import FrameSpace


@dataclass(frozen=True)
class StormConfig(LoopedConfig):
    """Sizes of a model. Defaults are the paper's where it has one (STORM, table 9)."""

    groups: int = 32
    classes: int = 32
    image: Literal["strided", "small"] = "strided"
    """strided: tables 2 and 3, squared errors. small: no strides, Bernoulli; frames of 0 and 255 up to 16 pixels."""
    stem: int = 32
    """Channels of the first convolution."""
    halvings: int = 4
    """Convolutions with stride 2; not of small frames."""
    uniform_mix: float = 0.01
    """Share of the uniform distribution in posterior and prior."""
    prior: Literal["factorised", "autoregressive"] = "factorised"
    """factorised: groups of next latents are drawn apart, as published. autoregressive: each given those before it."""
    sequence: Literal["looped", "two-layers"] = "looped"
    """two-layers: the authors' own sequence model, to compare with."""
    positions: int = 64
    """Learned positions: the longest sequence."""
    context: int = 16
    """Frames that an agent in the real environment carries along."""
    exit_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive_sizes(self, "groups", "classes", "stem", "halvings", "positions")
        if not 2 <= self.context <= self.positions:
            raise ValueError(f"context: {self.context} is outside 2 to positions, {self.positions}")
        if not 0 <= self.uniform_mix < 1:
            raise ValueError(f"uniform_mix: {self.uniform_mix} is outside 0 to 1")

    def core(self) -> CoreConfig:
        return replace(super().core(), exit_gate=self.exit_gate)


def log_probabilities(logits: Tensor, uniform_mix: float) -> Tensor:
    """Logits (..., G, K) as log-probabilities, of which a share is uniform (STORM, section 3.1)."""
    if not uniform_mix:
        return logits.float().log_softmax(-1)  # where a softmax is 0 its logarithm is not finite, nor is a KL
    probabilities = logits.float().softmax(-1)
    return ((1 - uniform_mix) * probabilities + uniform_mix / logits.shape[-1]).log()


def draw(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """One-hot samples (..., G, K), with the gradient of the probabilities: straight-through (STORM, section 3.1)."""
    p = log_p.exp()
    drawn = torch.multinomial(p.detach().flatten(0, -2), 1, generator=generator)
    hard = torch.zeros_like(p).flatten(0, -2).scatter_(1, drawn, 1.0).view_as(p)
    return hard + p - p.detach()


def mode(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """The likeliest of each group, one-hot (..., G, K): an imagination without chance, to compare with."""
    return F.one_hot(log_p.argmax(-1), log_p.shape[-1]).to(log_p.dtype)


Choose = Callable[[Tensor, torch.Generator], Tensor]
"""One-hot latents of log-probabilities (..., G, K)."""


def kl_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) in nats, summed over groups: (..., G, K) -> (...)."""
    return (log_q.exp() * (log_q - log_p)).sum((-2, -1))


class Unturned:
    """A `Rotary` that turns nothing: positions are learned."""

    coordinates = 1

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(1, 1, positions_BSP.shape[1], self.head_dim, device=positions_BSP.device)
        return ones, torch.zeros_like(ones)


SEQUENCES: dict[str, Callable[[StormConfig], LoopedAttention | TwoLayers]] = {
    "looped": lambda c: LoopedAttention(c.core(), Unturned(c.dim // c.heads), c.positions),
    "two-layers": lambda c: TwoLayers(c.dim, c.heads, c.mlp_dim),
}


class Prediction(NamedTuple):
    """From h (..., D): reward logits (..., BINS), end logits (...)."""

    reward: Tensor
    end: Tensor


class Storm(nn.Module):
    """Images, action mixer, sequence model and heads (STORM, tables 4, 5, 7 and 8)."""

    def __init__(self, config: StormConfig, space: FrameSpace) -> None:
        """Raises ValueError naming the key of the configuration that does not fit the frames."""
        super().__init__()
        self.config, self.actions = config, space.actions
        latent, dim = config.groups * config.classes, config.dim
        self.images = IMAGES[config.image](space.frame_shape, latent, config.stem, config.halvings)
        self.mixer = nn.Sequential(
            *(nn.Linear(latent + space.actions, dim, bias=False), nn.LayerNorm(dim), nn.ReLU()),
            *(nn.Linear(dim, dim, bias=False), nn.LayerNorm(dim)),
        )
        self.places = nn.Parameter(torch.randn(config.positions, dim) * dim**-0.5)
        self.place_norm = nn.LayerNorm(dim)
        self.dynamics = SEQUENCES[config.sequence](config)
        self.norm = nn.LayerNorm(dim)
        self.prior_head = PRIORS[config.prior](dim, config.groups, config.classes)
        self.reward_head, self.end_head = mlp(dim, dim, 2, BINS), mlp(dim, dim, 2, 1)

    def encode(self, obs: Tensor) -> Tensor:
        """The posterior of frames uint8 (..., H, W, C): log-probabilities (..., G, K)."""
        c, logits = self.config, self.images.encoder(as_pixels(obs)).unflatten(0, obs.shape[:-3])
        return log_probabilities(logits.unflatten(-1, (c.groups, c.classes)), c.uniform_mix)

    def decode(self, z: Tensor) -> Tensor:
        """What the decoder puts out for latents (..., G, K), flat: (N, C, H, W)."""
        return self.images.decoder(z.flatten(-2).flatten(0, -2))

    def mix(self, z: Tensor, action: Tensor) -> Tensor:
        """e (..., D) of latents (..., G, K) and actions (...) (STORM, table 4)."""
        chosen = F.one_hot(action, self.actions).to(z.dtype)
        return self.mixer(torch.cat((z.flatten(-2), chosen), -1))

    def run(self, e: Tensor, places: Tensor, first: Tensor, depth: Depth, cache: Any = None) -> DynamicsOutput[Any]:
        """h (B, T, D) of e (B, T, D) at places (B, T), which count from 0 at the sequence's first step (STORM, tables 5
        and 7)."""
        x = self.place_norm(e + self.places[places])
        out = self.dynamics(x[:, :, None], places[..., None, None], first, depth, cache)
        return replace(out, h=self.norm(out.h[:, :, 0]))

    def predict(self, h: Tensor) -> Prediction:
        return Prediction(self.reward_head(h), self.end_head(h)[..., 0])

    def prior(self, h: Tensor, z: Tensor) -> Tensor:
        """log p(z | h) by group and class (..., G, K) of the latents z (..., G, K) that follow h (..., D)."""
        return log_probabilities(self.prior_head.logits(h, z), self.config.uniform_mix)

    def expect(self, h: Tensor, choose: Choose, generator: torch.Generator) -> Tensor:
        """Latents (..., G, K) chosen from the prior at h (..., D)."""
        z = h.new_zeros(*h.shape[:-1], self.config.groups, self.config.classes)
        for groups in self.prior_head.turns:
            z[..., groups, :] = choose(self.prior(h, z)[..., groups, :], generator)
        return z
