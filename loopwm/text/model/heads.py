"""Heads on the latent h_k beside the decoder. h_k is the coda output at the state slots: (N, M, D).

h_k is the end of a residual stream, whose size is arbitrary and grows in training, so every head normalises it to a
root mean square of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.twohot import BINS, two_hot_mode, two_hot_value

POINTS = 100.0
"""Points of score that make a reward of 1."""

EPS = 1e-6


def _pooled(h_NMD: Tensor) -> Tensor:
    return unit(h_NMD).mean(1)


def unit(h: Tensor) -> Tensor:
    return F.rms_norm(h.float(), h.shape[-1:], eps=EPS).to(h.dtype)


@dataclass(frozen=True)
class Predictions:
    """Predictions of the heads for N steps.

    reward: (N,) most probable score difference of the last step in points; expected_reward: (N,) its mean;
    continuation: (N,) probability that the episode continues.
    """

    reward: Tensor
    expected_reward: Tensor
    continuation: Tensor


class PredictionHeads(nn.Module):
    """Predict reward (symlog two-hot logits) and continuation (one logit) from the mean of h_k over its slots.

    LoopWM, equation 3: r_hat and c_hat. Both start at zero: a reward of about 0 and an even chance.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reward = nn.Linear(dim, BINS)
        self.continuation = nn.Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.reward, self.continuation):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, h_NMD: Tensor) -> tuple[Tensor, Tensor]:
        """Return reward logits (N, BINS) and continuation logits (N,)."""
        pooled = _pooled(h_NMD)
        return self.reward(pooled), self.continuation(pooled)[:, 0]

    def predict(self, h_NMD: Tensor) -> Predictions:
        reward, continuation = self(h_NMD)
        return Predictions(
            POINTS * two_hot_mode(reward), POINTS * two_hot_value(reward), continuation.float().sigmoid()
        )


class BagHead(nn.Linear):
    """Predict the words of observation k from the state h^(T) of its slots, as a query for the tied output embedding.

    Used in training only (`loopwm.text.training.loss.bag_of_words_loss`), so it belongs to the objective.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)

    def forward(self, h_NMD: Tensor) -> Tensor:
        """Return queries (N, D)."""
        return super().forward(_pooled(h_NMD))


class MonitorHead(nn.Linear):
    """Compute g_omega, a summary of h_k as a unit vector (LoopWM, equation 20; LoopWM, section 3.5.5)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, h_NMD: Tensor) -> Tensor:
        """Return (N, D), every row of length 1."""
        return F.normalize(super().forward(_pooled(h_NMD)).float(), dim=-1)  # compared with unit vectors
