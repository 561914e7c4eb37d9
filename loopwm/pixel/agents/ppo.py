"""Proximal policy optimisation over rollouts with memory (TWISTED, appendix B.3.2).

    A_t = delta_t + (1 - over_t) gamma lambda A_{t+1}        delta_t = r_t + (1 - done_t) gamma v_{t+1} - v_t
    q_t = A_t + v_t                                          over_t: the episode ends, done_t: it is terminated

Advantages are standardised over a batch, those of imagined play by the real play's standard deviation: in a world
without signal, noise would be scaled up to the size of a signal. The critic predicts targets standardised by moving
statistics; its values are de-standardised before they enter A_t. A truncated episode bootstraps from its last frame, a
terminated one does not.

Shape suffixes: B environments, T steps, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from loopwm.pixel.agents.ppo_policy import ActorCritic
from loopwm.pixel.dynamics import require_at_least

MIN_DEVIATION = 1e-6


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters; defaults are the paper's for Craftax-classic (TWISTED, table 8)."""

    gamma: float = 0.925
    td_lambda: float = 0.625
    clip: float = 0.2
    value_coef: float = 2.0
    entropy_coef: float = 0.01
    target_discount: float = 0.95
    """alpha, decay of the moving mean and standard deviation of targets per batch."""
    learning_rate: float = 4.5e-4
    clip_norm: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(0, self, *(field.name for field in fields(self)))
        if self.target_discount >= 1:  # the statistics would keep their start
            raise ValueError(f"target_discount: must be below 1, got {self.target_discount}")


@dataclass(frozen=True)
class Trajectories:
    """Steps of a policy.

    obs: uint8 (B, T, H, W, C)
    memory: (B, Y) before the first step
    fresh: memory at an episode's beginning, (B, T, Y)
    value, next_value: standardised, of the frame before and after each step; a truncated episode's last frame included
    log_p: log-probability of the action under the policy that took it
    all others: (B, T)
    """

    obs: Tensor
    first: Tensor
    action: Tensor
    log_p: Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    memory: Tensor
    fresh: Tensor

    def select(self, rows: Tensor) -> Trajectories:
        return Trajectories(*(getattr(self, field.name)[rows] for field in fields(self)))


class TargetScale:
    """Moving mean and standard deviation of value targets: the critic's unit (TWISTED, appendix B.3.2)."""

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.mean, self.deviation, self.weight = 0.0, 0.0, 0.0

    def update(self, targets: Tensor) -> None:
        """Update the statistics with a batch of targets. The initial values have no weight."""
        keep = self.discount
        self.mean = keep * self.mean + (1 - keep) * targets.mean().item()
        self.deviation = keep * self.deviation + (1 - keep) * targets.std(correction=0).item()
        self.weight = keep * self.weight + (1 - keep)  # share of real targets in the moving sums

    def _moments(self) -> tuple[float, float]:
        if not self.weight:
            return 0.0, 1.0
        return self.mean / self.weight, max(self.deviation / self.weight, MIN_DEVIATION)

    def standardise(self, targets: Tensor) -> Tensor:
        mean, deviation = self._moments()
        return (targets - mean) / deviation

    def restore(self, values: Tensor) -> Tensor:
        mean, deviation = self._moments()
        return values * deviation + mean

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "deviation": self.deviation, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.deviation, self.weight = state["mean"], state["deviation"], state["weight"]


def advantages(data: Trajectories, scale: TargetScale, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """Compute A_t and q_t, both (B, T), in units of reward (TWISTED, appendix B.3.2)."""
    value, next_value = scale.restore(data.value), scale.restore(data.next_value)
    # A truncated step bootstraps (`going`), but no advantage crosses the end of an episode (`within`).
    going = 1 - data.terminated.float()
    delta = data.reward + going * config.gamma * next_value - value
    within = 1 - (data.terminated | data.truncated).float()
    gae, after = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        after = delta[:, t] + within[:, t] * config.gamma * config.td_lambda * after
        gae[:, t] = after
    return gae, gae + value


def ppo_loss(
    policy: ActorCritic, data: Trajectories, advantage: Tensor, target: Tensor, config: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped objective, squared error of standardised values and entropy, averaged over steps.

    advantage, target: standardised, (B, T). Source: TWISTED, appendix B.3.2.
    """
    out = policy(data.obs, data.first, data.memory, data.fresh)
    log_p = F.log_softmax(out.logits.float(), -1)
    ratio = (log_p.gather(-1, data.action[..., None])[..., 0] - data.log_p).exp()  # 1 before the first update
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    value = (out.value - target).square().mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    loss = config.value_coef * value - gain - config.entropy_coef * entropy
    beyond = ((ratio - 1).abs() > config.clip).float().mean()
    diagnostics = {"gain": gain, "value_loss": value, "entropy": entropy, "clipped_share": beyond}
    return loss, {name: number.detach() for name, number in diagnostics.items()}


class PPO:
    """Policy with its optimiser and the scale of its targets."""

    def __init__(self, policy: ActorCritic, config: PPOConfig) -> None:
        self.policy, self.config = policy, config
        self.optimizer: Optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
        self.scale = TargetScale(config.target_discount)

    def update(
        self,
        data: Trajectories,
        epochs: int,
        minibatches: int,
        generator: torch.Generator,
        deviation: float | None = None,
    ) -> dict[str, float]:
        """Run `epochs` passes over the environments of a rollout in `minibatches` parts, in random order.

        Returns diagnostics averaged over parts, and the standard deviation of advantages. deviation: divisor of
        advantages, None for their own standard deviation. Raises ValueError for more parts than environments.
        """
        if not 1 <= minibatches <= len(data.obs):
            raise ValueError(f"minibatches: must be between 1 and {len(data.obs)} environments, got {minibatches}")
        advantage, target = advantages(data, self.scale, self.config)
        own = advantage.std(correction=0).item()
        advantage = (advantage - advantage.mean()) / max(own if deviation is None else deviation, MIN_DEVIATION)
        # Update before standardising: the critic learns targets in the unit in which its next values are restored.
        self.scale.update(target)
        target = self.scale.standardise(target)
        totals: dict[str, float] = {"advantage_deviation": own}
        orders = (torch.randperm(len(data.obs), generator=generator) for _ in range(epochs))
        for rows in (part for order in orders for part in order.tensor_split(minibatches)):
            part = data.select(rows)
            loss, diagnostics = ppo_loss(self.policy, part, advantage[rows], target[rows], self.config)
            self.optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.clip_norm)
            self.optimizer.step()
            for name, number in {"loss": loss.detach(), "grad_norm": norm, **diagnostics}.items():
                totals[name] = totals.get(name, 0.0) + number.item() / (epochs * minibatches)
        return totals
