"""STORM's network on the looped core: a frame is one slot of categorical latents.

    z_t ~ q(z_t | o_t)                posterior, from the frame only           o_t' = p(z_t)
    e_t = m(z_t, a_t)                 action mixer
    h_1 .. h_T = f(e_1 .. e_T)        learned positions, LayerNorm, looped core, LayerNorm
    p(z_{t+1} | h_t)  r_t(h_t)  c_t(h_t)                                       prior, reward, continuation

Departures: the looped core instead of two post-norm layers, so no dropout; reward and end heads start at zero.

Shape suffixes: B batch, T environment steps, G groups, K classes of a group, D width, A actions, H/W/C frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.twohot import BINS
from loopwm.pixel.agents.actor_critic import mlp
from loopwm.pixel.dynamics import (
    Depth,
    DynamicsOutput,
    FrameCache,
    LoopedAttention,
    LoopedConfig,
    as_pixels,
    require_at_least,
)
from loopwm.pixel.storm.images import IMAGES
from loopwm.records.frames import FrameSpace


class Factorised(nn.Linear):
    """Linear logits of h, independent for each group (STORM, table 8)."""

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__(dim, groups * classes)
        self.groups, self.classes = groups, classes
        self.turns = (slice(0, groups),)

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """Return logits (..., G, K) from h (..., D); z is ignored."""
        return self(h).unflatten(-1, (self.groups, self.classes))


class Autoregressive(nn.Module):
    """Autoregressive p(z | h), the product of p(z_g | z_1 .. z_{g-1}, h) (NADE, Larochelle and Murray 2011).

    Groups that encode the same random event, such as the ball's direction, must agree; independent groups cannot.
    Groups share their hidden units except for the sum of the contributions of earlier groups, so one pass computes all.
    """

    def __init__(self, dim: int, groups: int, classes: int) -> None:
        super().__init__()
        self.turns = tuple(slice(g, g + 1) for g in range(groups))
        width = 4 * dim
        self.hidden = nn.Linear(dim, width)
        self.told = nn.Parameter(torch.randn(groups, classes, width) * width**-0.5)
        self.out = nn.Parameter(torch.randn(groups, width, classes) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(groups, classes))

    def logits(self, h: Tensor, z: Tensor) -> Tensor:
        """Return logits (..., G, K) from h (..., D) and one-hot z (..., G, K); a group depends on those before it."""
        contribution = torch.einsum("...gk,gkd->...gd", z, self.told)  # one-hot: the row of its class
        # Shift by one group: a group must not condition on itself.
        before = nn.functional.pad(contribution.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        units = nn.functional.silu(self.hidden(h)[..., None, :] + before)
        return torch.einsum("...gd,gdk->...gk", units, self.out) + self.bias


PRIORS: dict[str, type[Factorised] | type[Autoregressive]] = {
    "factorised": Factorised,
    "autoregressive": Autoregressive,
}
"""Priors with `logits`, and `turns`: slices of the groups that are sampled one after another."""


@dataclass(frozen=True)
class StormConfig(LoopedConfig):
    """Sizes of a model; defaults are the paper's where it gives them (STORM, table 9)."""

    groups: int = 32
    classes: int = 32
    image: Literal["strided", "small"] = "strided"
    """strided: tables 2 and 3, squared error. small: no strides, Bernoulli; binary frames up to 16 pixels."""
    stem: int = 32
    """Channels of the first convolution."""
    halvings: int = 4
    """Convolutions with stride 2; unused for small frames."""
    uniform_mix: float = 0.01
    """Share of the uniform distribution in posterior and prior."""
    prior: Literal["factorised", "autoregressive"] = "factorised"
    """factorised: independent groups, as published. autoregressive: each group given those before it."""
    positions: int = 64
    """Learned positions: the maximum sequence length."""
    context: int = 16
    """Context frames of an agent in the real environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "groups", "classes", "stem", "halvings", "positions")
        if not 2 <= self.context <= self.positions:
            raise ValueError(f"context: must be between 2 and positions ({self.positions}), got {self.context}")
        if not 0 <= self.uniform_mix < 1:
            raise ValueError(f"uniform_mix: must be at least 0 and below 1, got {self.uniform_mix}")


def log_probabilities(logits: Tensor, uniform_mix: float) -> Tensor:
    """Convert logits (..., G, K) to log-probabilities mixed with the uniform distribution (STORM, section 3.1)."""
    if not uniform_mix:
        return logits.float().log_softmax(-1)  # the log of a softmax that is 0 and its KL are not finite
    probabilities = logits.float().softmax(-1)
    return ((1 - uniform_mix) * probabilities + uniform_mix / logits.shape[-1]).log()


def sample_latents(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one-hot latents (..., G, K) with straight-through gradients (STORM, section 3.1)."""
    p = log_p.exp()
    index = torch.multinomial(p.detach().flatten(0, -2), 1, generator=generator)
    hard = torch.zeros_like(p).flatten(0, -2).scatter_(1, index, 1.0).view_as(p)
    return hard + p - p.detach()  # value of `hard`, gradient of `p`


def mode(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Return the most likely class of each group, one-hot (..., G, K): deterministic imagination, for comparison."""
    return F.one_hot(log_p.argmax(-1), log_p.shape[-1]).to(log_p.dtype)


Choose = Callable[[Tensor, torch.Generator], Tensor]
"""Choice of one-hot latents from log-probabilities (..., G, K)."""


def kl_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Compute KL(q || p) in nats, summed over groups: (..., G, K) -> (...)."""
    return (log_q.exp() * (log_q - log_p)).sum((-2, -1))


class Prediction(NamedTuple):
    """Reward logits (..., BINS) and end logits (...)."""

    reward: Tensor
    end: Tensor


class Storm(nn.Module):
    """Images, action mixer, sequence model and heads (STORM, tables 4, 5, 7 and 8)."""

    def __init__(self, config: StormConfig, space: FrameSpace) -> None:
        """Create the network. Raises ValueError if a key does not fit the frames; the message names it."""
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
        self.dynamics = LoopedAttention(config.core(), config.positions)
        self.norm = nn.LayerNorm(dim)
        self.prior_head = PRIORS[config.prior](dim, config.groups, config.classes)
        self.reward_head, self.end_head = mlp(dim, dim, 2, BINS), mlp(dim, dim, 2, 1)

    def encode(self, obs: Tensor) -> Tensor:
        """Encode frames uint8 (..., H, W, C): posterior log-probabilities (..., G, K)."""
        c, logits = self.config, self.images.encoder(as_pixels(obs)).unflatten(0, obs.shape[:-3])
        return log_probabilities(logits.unflatten(-1, (c.groups, c.classes)), c.uniform_mix)

    def decode(self, z: Tensor) -> Tensor:
        """Decode latents (..., G, K) to flat decoder output (N, C, H, W)."""
        return self.images.decoder(z.flatten(-2).flatten(0, -2))

    def mix(self, z: Tensor, action: Tensor) -> Tensor:
        """Mix latents (..., G, K) and actions (...) to e (..., D) (STORM, table 4)."""
        chosen = F.one_hot(action, self.actions).to(z.dtype)
        return self.mixer(torch.cat((z.flatten(-2), chosen), -1))

    def run(
        self, e: Tensor, places: Tensor, first: Tensor, depth: Depth, cache: FrameCache | None = None
    ) -> DynamicsOutput:
        """Run the sequence model on e (B, T, D) (STORM, tables 5 and 7).

        places: (B, T), counted from the sequence's first step
        """
        x = self.place_norm(e + self.places[places])
        # Positions are learned: at 0 for all, the rotary embedding changes nothing.
        out = self.dynamics(x[:, :, None], torch.zeros_like(places)[..., None, None], first, depth, cache)
        return replace(out, h=self.norm(out.h[:, :, 0]))

    def predict(self, h: Tensor) -> Prediction:
        return Prediction(self.reward_head(h), self.end_head(h)[..., 0])

    def prior(self, h: Tensor, z: Tensor) -> Tensor:
        """Return the prior log-probabilities (..., G, K) given h (..., D); z: the latents that follow, (..., G, K)."""
        return log_probabilities(self.prior_head.logits(h, z), self.config.uniform_mix)

    def expect(self, h: Tensor, choose: Choose, generator: torch.Generator) -> Tensor:
        """Choose latents (..., G, K) from the prior at h (..., D)."""
        z = h.new_zeros(*h.shape[:-1], self.config.groups, self.config.classes)
        for groups in self.prior_head.turns:
            z[..., groups, :] = choose(self.prior(h, z)[..., groups, :], generator)
        return z
