"""Recurrent actor-critic network over frames (TWISTED, appendix B.3.1).

Shape suffixes: B environments, T steps, H/W/C frame, Z encoded frame, Y memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.pixel.dynamics import as_pixels, require_at_least
from loopwm.records.errors import InputError


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes; defaults are the paper's for Craftax-classic. MinAtar uses layer norm, Swish and shared heads."""

    channels: tuple[int, ...] = (64, 64, 128)
    """Channels of each convolutional block, which halves the frame."""
    memory: int = 256
    """Width of the GRU's input and state."""
    hidden: int = 2048
    """Width of a head."""
    norm: Literal["instance", "layer"] = "instance"
    activation: Literal["relu", "silu"] = "relu"
    shared_heads: bool = False
    """Share all but the last layer of actor and critic."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "memory", "hidden")
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"channels: must be at least one number above zero, got {self.channels}")

    def activate(self) -> nn.Module:
        return nn.ReLU() if self.activation == "relu" else nn.SiLU()

    def normalise(self, channels: int) -> nn.Module:
        """Create a norm of (B, channels, H, W); layer norm is over channels, height and width."""
        if self.norm == "instance":
            return nn.InstanceNorm2d(channels, affine=True)
        return nn.GroupNorm(1, channels)  # one group: layer norm


class ActorCriticOutput(NamedTuple):
    """Output. logits: (B, T, A) of actions; value: (B, T) standardised; memory: (B, Y) after the last step."""

    logits: Tensor
    value: Tensor
    memory: Tensor


class ActorCritic(nn.Module):
    """Encoder, GRU, and two heads on [z, y]."""

    def __init__(self, config: PolicyConfig, frame_shape: tuple[int, int, int], actions: int) -> None:
        super().__init__()
        self.config = config
        height, width, channels = frame_shape
        widths = (channels, *config.channels)
        self.encoder = nn.Sequential(*(_Block(config, *pair) for pair in pairwise(widths)))
        for _ in config.channels:
            height, width = -(-height // 2), -(-width // 2)  # rounded up, as pooling with a padding of 1 does
        if config.norm == "instance" and height * width == 1:
            raise InputError("policy.channels: must leave more than one place of a frame to policy.norm=instance")
        encoded = height * width * config.channels[-1]
        self.to_memory = nn.Sequential(
            config.activate(), nn.Linear(encoded, config.memory), nn.LayerNorm(config.memory)
        )
        self.memory = nn.GRUCell(config.memory, config.memory)
        trunks = [_trunk(config, encoded + config.memory) for _ in range(1 if config.shared_heads else 2)]
        self.trunks = nn.ModuleList(trunks)
        self.actor, self.critic = nn.Linear(config.hidden, actions), nn.Linear(config.hidden, 1)
        for head, scale in ((self.actor, 0.01), (self.critic, 1.0)):  # a nearly uniform policy at first
            nn.init.orthogonal_(head.weight, scale)
            nn.init.zeros_(head.bias)

    def initial(self, batch: int, device: torch.device) -> Tensor:
        """Return an empty memory (B, Y)."""
        return torch.zeros(batch, self.config.memory, device=device)

    def forward(self, obs: Tensor, first: Tensor, memory: Tensor, fresh: Tensor) -> ActorCriticOutput:
        """Run T steps.

        Args:
            obs: frames uint8 (B, T, H, W, C)
            first: bool (B, T), True where the memory is reset to `fresh`
            memory: (B, Y) before the first frame
            fresh: memory at an episode's beginning, (B, T, Y)
        """
        z = self.encoder(as_pixels(obs)).flatten(1).unflatten(0, obs.shape[:2])
        inputs, memories = self.to_memory(z), []
        for t in range(obs.shape[1]):
            memory = self.memory(inputs[:, t], torch.where(first[:, t, None], fresh[:, t], memory))
            memories.append(memory)
        features = torch.cat((z, torch.stack(memories, 1)), -1)
        actor_features, critic_features = (trunk(features) for trunk in (self.trunks[0], self.trunks[-1]))
        return ActorCriticOutput(self.actor(actor_features), self.critic(critic_features)[..., 0], memory)

    def step(self, obs: Tensor, memory: Tensor) -> ActorCriticOutput:
        """Run one frame, obs (B, H, W, C): logits (B, A), value (B,), memory (B, Y) after it."""
        carried = torch.zeros(len(obs), 1, dtype=torch.bool, device=obs.device)
        out = self(obs[:, None], carried, memory, memory[:, None])
        return ActorCriticOutput(out.logits[:, 0], out.value[:, 0], out.memory)


class _Block(nn.Module):
    """Norm, convolution, pooling by two, and two residual convolutions."""

    def __init__(self, config: PolicyConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reduce = nn.Sequential(
            config.normalise(inputs), nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)
        )
        self.residuals = nn.ModuleList(
            nn.Sequential(config.activate(), config.normalise(outputs), nn.Conv2d(outputs, outputs, 3, padding=1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x)
        for residual in self.residuals:
            x = x + residual(x)
        return x


class _Residual(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width = config.hidden
        self.layers = nn.Sequential(
            nn.Linear(width, width), config.activate(), nn.Linear(width, width), config.activate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _trunk(config: PolicyConfig, inputs: int) -> nn.Sequential:
    """Create the layers of a head before its last one."""
    return nn.Sequential(
        config.activate(),
        nn.LayerNorm(inputs),
        nn.Linear(inputs, config.hidden),
        config.activate(),
        _Residual(config),
        nn.LayerNorm(config.hidden),
    )


def sample_action(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample actions int64 (B,) from logits (B, A); return them with their log-probabilities (B,)."""
    log_p = F.log_softmax(logits.float(), -1)
    action = torch.multinomial(log_p.exp(), 1, generator=generator)[:, 0]
    return action, log_p.gather(1, action[:, None])[:, 0]
