"""Actor-critic on vectors or frames, with or without memory, trained by REINFORCE with a baseline.

    G_t = r_t + gamma (1 - d_t) [(1 - lambda) V(s_{t+1}) + lambda G_{t+1}]
    actor:  - (G_t - V(s_t)) / S log pi(a_t | s_t) - eta H(pi(. | s_t))
    critic: loss(V(s_t), G_t) + loss(V(s_t), V_slow(s_t))            the slow critic regularises, it does not bootstrap

(STORM, section 3.2; EDELINE has the same without S and V_slow, and with squared errors.) d_t: the step ended the
episode. Steps after an end are masked.

Shape suffixes: B rows, T steps, A actions, F feature width, Y memory width, K critic outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from loopwm.core.twohot import BINS, two_hot_loss, two_hot_value
from loopwm.pixel.dynamics import as_pixels, masked_mean, require_at_least
from loopwm.pixel.imagined import LatentWorld

S = TypeVar("S")


@dataclass(frozen=True)
class ActorCriticConfig:
    """Hyperparameters; defaults are STORM's (table 9). Raises ValueError for values out of range."""

    hidden: int = 512
    hidden_layers: int = 2
    """Hidden layers of actor and critic each."""
    memory: int = 0
    """Width of an LSTM between encoder and heads; 0 for none."""
    channels: tuple[int, ...] = ()
    """Channels of a convolutional encoder of frames, each block of which halves them; none for vectors."""
    from_play: bool = False
    """Learn from real play too."""
    gamma: float = 0.985
    td_lambda: float = 0.95
    entropy_coef: float = 3e-4
    critic: Literal["two-hot", "squared"] = "two-hot"
    percentiles: tuple[float, ...] = (5.0, 95.0)
    """Percentiles whose distance scales advantages; none for no scaling."""
    scale_decay: float = 0.99
    slow_decay: float = 0.98
    """Decay of the slow critic's weights; 0 for no slow critic."""
    learning_rate: float = 3e-5
    clip_norm: float = 100.0

    def __post_init__(self) -> None:
        for name in ("hidden", "hidden_layers", "learning_rate", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        for name in ("gamma", "td_lambda", "scale_decay", "slow_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be between 0 and 1, got {getattr(self, name)}")
        require_at_least(0, self, "memory", "entropy_coef")
        low_high = self.percentiles
        if low_high and not (len(low_high) == 2 and 0 <= low_high[0] < low_high[1] <= 100):
            raise ValueError(f"percentiles: must be two rising numbers within 0 to 100, or none, got {low_high}")


class PolicyOutput(NamedTuple):
    """Output. logits: (B, T, A) of actions; critic: (B, T, K) raw; memory: (B, Y) after the last step."""

    logits: Tensor
    critic: Tensor
    memory: Tensor


class FrameEncoder(nn.Module):
    """Convolutional encoder of uint8 frames (B, T, H, W, C) to vectors (B, T, F)."""

    def __init__(self, frame_shape: tuple[int, int, int], channels: tuple[int, ...]) -> None:
        super().__init__()
        height, width, inputs = frame_shape
        blocks: list[nn.Module] = []
        for outputs in channels:
            blocks += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(1, outputs), nn.SiLU()]
            inputs, height, width = outputs, -(-height // 2), -(-width // 2)
        self.blocks, self.features = nn.Sequential(*blocks), inputs * height * width

    def forward(self, frames: Tensor) -> Tensor:
        return self.blocks(as_pixels(frames)).flatten(1).unflatten(0, frames.shape[:2])


def mlp(inputs: int, hidden: int, hidden_layers: int, outputs: int) -> nn.Sequential:
    """Create Linear, LayerNorm and ReLU blocks and a linear layer of zeros.

    Initial outputs are uniform (STORM, table 8).
    """
    layers: list[nn.Module] = []
    for width in [inputs] + [hidden] * (hidden_layers - 1):
        layers += [nn.Linear(width, hidden, bias=False), nn.LayerNorm(hidden), nn.ReLU()]
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _lstm(inputs: int, width: int) -> nn.LSTMCell:
    """Create an LSTM cell whose forget gates start open.

    PyTorch's are about a half: a cue of ten steps ago and its gradient shrink to a thousandth (Jozefowicz et al. 2015).
    """
    cell = nn.LSTMCell(inputs, width)
    with torch.no_grad():
        cell.bias_hh[width : 2 * width] += 2.0  # gates: input, forget, cell, output
    return cell


class ActorCriticNetwork(nn.Module):
    """Encoder, LSTM, and two heads."""

    def __init__(self, config: ActorCriticConfig, input_shape: tuple[int, ...], actions: int) -> None:
        """Create the network.

        input_shape: (F,) of vectors, or (H, W, C) of frames, which need `channels`; others raise ValueError
        """
        super().__init__()
        if (len(input_shape) == 3) != bool(config.channels):
            raise ValueError(f"channels: must be set for frames only, got {config.channels} for inputs {input_shape}")
        self.config = config
        self.encoder: nn.Module = nn.Identity()
        features = input_shape[0]
        if len(input_shape) == 3:
            encoder = FrameEncoder((input_shape[0], input_shape[1], input_shape[2]), config.channels)
            self.encoder, features = encoder, encoder.features
        self.memory = _lstm(features, config.memory) if config.memory else None
        width = config.memory or features
        self.actor = mlp(width, config.hidden, config.hidden_layers, actions)
        self.critic = mlp(width, config.hidden, config.hidden_layers, BINS if config.critic == "two-hot" else 1)

    def initial(self, batch: int, device: torch.device) -> Tensor:
        """Return an empty memory (B, Y): Y is 2 `memory`, hidden and cell state side by side."""
        return torch.zeros(batch, 2 * self.config.memory, device=device)

    def forward(self, inputs: Tensor, first: Tensor, memory: Tensor, fresh: Tensor | None = None) -> PolicyOutput:
        """Run T steps.

        inputs: (B, T, F) or (B, T, H, W, C)
        first: bool (B, T), True where the memory is reset to `fresh`, (B, T, Y), None for empty
        memory: (B, Y) before the first step
        """
        features, memory = self.remember(inputs, first, memory, fresh)
        return PolicyOutput(self.actor(features), self.critic(features), memory)

    def remember(
        self, inputs: Tensor, first: Tensor, memory: Tensor, fresh: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the heads' input, (B, T, F), and the memory (B, Y) after the last step."""
        encoded = self.encoder(inputs)
        if self.memory is None or not encoded.shape[1]:
            return encoded, memory
        if fresh is None:
            fresh = memory.new_zeros(1, 1, 1).expand(*first.shape, memory.shape[-1])
        outputs = []
        for t in range(encoded.shape[1]):
            hidden, cell = torch.where(first[:, t, None], fresh[:, t], memory).chunk(2, -1)  # before the step
            hidden, cell = self.memory(encoded[:, t], (hidden, cell))
            outputs.append(hidden)
            memory = torch.cat((hidden, cell), -1)  # one tensor, as memories of other policies
        return torch.stack(outputs, 1), memory

    def step(self, inputs: Tensor, first: Tensor, memory: Tensor, fresh: Tensor | None = None) -> PolicyOutput:
        """Run one step: inputs (B, ...), first (B,), fresh (B, Y); outputs have no T."""
        out = self(inputs[:, None], first[:, None], memory, None if fresh is None else fresh[:, None])
        return PolicyOutput(out.logits[:, 0], out.critic[:, 0], out.memory)

    def value(self, critic: Tensor) -> Tensor:
        """Return V in units of reward: (..., K) -> (...)."""
        return two_hot_value(critic) if self.config.critic == "two-hot" else critic[..., 0].float()

    def critic_loss(self, critic: Tensor, target: Tensor) -> Tensor:
        """Return the loss of raw outputs (..., K) against values (...)."""
        if self.config.critic == "two-hot":
            return two_hot_loss(critic, target)
        return (critic[..., 0].float() - target).square()


@dataclass(frozen=True)
class Experience:
    """Experience of a policy in T steps, and its input after the last.

    before, before_first: earlier inputs (B, K, ...) and bool (B, K), which are run again to train the memory on them
    memory: (B, Y) before all inputs
    inputs: (B, T + 1, ...)
    first: bool (B, T + 1)
    fresh: memory at an episode's beginning, (B, T + 1, Y)
    final_value: V after a truncated step, whose next input is another episode's; ignored elsewhere
    valid: False after a row's first end
    all others: (B, T)
    """

    before: Tensor
    before_first: Tensor
    memory: Tensor
    inputs: Tensor
    first: Tensor
    fresh: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_value: Tensor
    valid: Tensor


def lambda_returns(
    reward: Tensor, terminated: Tensor, truncated: Tensor, next_value: Tensor, gamma: float, td_lambda: float
) -> Tensor:
    """Compute G_t (B, T) of steps (B, T). next_value: V after each step.

    A terminated step is worth its reward; a truncated one, and the last, bootstraps from next_value only (STORM,
    section 3.2; the published code uses V(s_t) for V(s_{t+1})).
    """
    after, returns = next_value[:, -1], []
    for t in reversed(range(reward.shape[1])):
        # The return after a truncated step is another episode's: bootstrap from V only.
        mixed = torch.where(truncated[:, t], next_value[:, t], torch.lerp(next_value[:, t], after, td_lambda))
        after = reward[:, t] + gamma * torch.where(terminated[:, t], 0.0, mixed)
        returns.append(after)
    return torch.stack(returns[::-1], 1)


def valid_mask(terminated: Tensor) -> Tensor:
    """Return the valid mask (B, T): False after the first terminated step of a row."""
    return (terminated.long().cumsum(1) - terminated.long()) == 0


class PercentileScale:
    """Moving range of returns between two percentiles, at least 1 (DreamerV3; STORM, section 3.2).

    The first batch has full weight.
    """

    def __init__(self, percentiles: tuple[float, ...], decay: float) -> None:
        self.percentiles, self.decay = percentiles, decay
        self.low: float | None = None
        self.high: float | None = None

    def update(self, returns: Tensor) -> float:
        """Update with returns (n,); return the range, 1 without percentiles."""
        if not self.percentiles:
            return 1.0
        at = torch.tensor(self.percentiles, device=returns.device) / 100
        low, high = returns.float().quantile(at).tolist()
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        self.low = self.decay * self.low + (1 - self.decay) * low
        self.high = self.decay * self.high + (1 - self.decay) * high
        # At least 1, so that small returns, which are mostly noise, are not scaled up.
        return max(1.0, self.high - self.low)


class ActorCriticLearner:
    """Network with optimiser, slow critic and return scale. Each batch of experience is used for one step."""

    def __init__(self, network: ActorCriticNetwork, config: ActorCriticConfig) -> None:
        self.network, self.config = network, config
        self.optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.slow_critic = copy.deepcopy(network.critic).requires_grad_(False)
        self.scale = PercentileScale(config.percentiles, config.scale_decay)

    def update(self, data: Experience) -> dict[str, float]:
        """Take one optimiser step; return diagnostics."""
        loss, diagnostics = self.loss(data)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        self.optimizer.step()
        for slow, new in zip(self.slow_critic.parameters(), self.network.critic.parameters(), strict=True):
            slow.lerp_(new.detach(), 1 - self.config.slow_decay)
        return {"loss": loss.item(), "grad_norm": norm.item()} | diagnostics

    def loss(self, data: Experience) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss, averaged over valid steps, and diagnostics; update the return scale."""
        c, network, steps = self.config, self.network, data.action.shape[1]
        memory = data.memory
        if network.config.memory and data.before.shape[1]:
            _, memory = network.remember(data.before, data.before_first, memory)
        features, _ = network.remember(data.inputs, data.first, memory, data.fresh)
        critic, features = network.critic(features), features[:, :steps]  # the last input only bootstraps
        # The baseline must not carry the critic's gradient into the actor's loss.
        value = network.value(critic).detach()
        next_value = torch.where(data.truncated, data.final_value, value[:, 1:])  # another episode follows
        returns = lambda_returns(data.reward, data.terminated, data.truncated, next_value, c.gamma, c.td_lambda)
        scale = self.scale.update(returns[data.valid])
        log_p = network.actor(features).float().log_softmax(-1)
        chosen = log_p.gather(-1, data.action[..., None])[..., 0]
        gain = masked_mean((returns - value[:, :steps]) / scale * chosen, data.valid)
        entropy = masked_mean(-(log_p.exp() * log_p).sum(-1), data.valid)
        critic_loss = masked_mean(network.critic_loss(critic[:, :steps], returns), data.valid)
        loss = critic_loss - gain - c.entropy_coef * entropy
        if c.slow_decay:
            slow = network.value(self.slow_critic(features)).detach()
            loss = loss + masked_mean(network.critic_loss(critic[:, :steps], slow), data.valid)
        means = {"entropy": entropy, "value_loss": critic_loss, "gain": gain}
        means |= {"return": masked_mean(returns, data.valid), "value": masked_mean(value[:, :steps], data.valid)}
        return loss, {name: mean.item() for name, mean in means.items()} | {"scale": scale}

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "slow_critic": self.slow_critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": (self.scale.low, self.scale.high),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.slow_critic.load_state_dict(state["slow_critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale.low, self.scale.high = state["scale"]


@torch.no_grad()
def dream(
    world: LatentWorld[S], network: ActorCriticNetwork, state: S, steps: int, generator: torch.Generator
) -> Experience:
    """Imagine `steps` steps from a state, on the device and without decoding frames.

    Rows continue after their ends, where they are invalid.
    """
    inputs = [world.features(state)]
    memory = empty = network.initial(len(inputs[0]), inputs[0].device)
    carried = torch.zeros(len(memory), dtype=torch.bool, device=memory.device)  # no resets: rows are invalid after ends
    columns = []
    for _ in range(steps):
        out = network.step(inputs[-1], carried, memory)
        memory = out.memory
        action = torch.multinomial(out.logits.float().softmax(-1), 1, generator=generator)[:, 0]
        outcome = world.step(state, action, generator)
        state = outcome.state
        inputs.append(world.features(state))
        columns.append((action, outcome.reward, outcome.terminated))
    action, reward, terminated = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    features = torch.stack(inputs, 1)
    return Experience(
        before=features[:, :0],
        before_first=carried[:, None].expand(-1, 0),
        memory=empty,
        inputs=features,
        first=carried[:, None].expand(-1, steps + 1),
        fresh=empty[:, None].expand(-1, steps + 1, -1),
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        final_value=torch.zeros_like(reward),
        valid=valid_mask(terminated),
    )
