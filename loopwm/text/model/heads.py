"""Heads on the latent h_k beside the decoder. h_k is the coda output at the state slots: (N, M, D).

h_k is the end of a residual stream, whose size is arbitrary and grows in training, so every head normalises it to a
root mean square of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_POINTS = 127
"""Largest reward, in points of either sign, that has a class of its own; larger ones are clipped."""

EPS = 1e-6


def pooled(h_NMD: Tensor) -> Tensor:
    """Return what every head reads: the mean over slots, each of unit root mean square. (N, M, D) -> (N, D)."""
    return unit(h_NMD).mean(1)


def unit(h: Tensor) -> Tensor:
    return F.rms_norm(h.float(), h.shape[-1:], eps=EPS).to(h.dtype)


@dataclass(frozen=True)
class Predictions:
    """Predictions of the heads for N steps.

    reward: (N,) most probable score difference of the last step in whole points; expected_reward: (N,) its mean;
    continuation: (N,) probability that the episode continues. acceptance: (N,) probability that the action is carried
    out, not refused.
    """

    reward: Tensor
    expected_reward: Tensor
    continuation: Tensor
    acceptance: Tensor


class PredictionHeads(nn.Module):
    """Predict reward (a logit for each number of points), continuation and acceptance from the mean of h_k's slots.

    LoopWM, equation 3: r_hat and c_hat. Scores are whole numbers, and classes do not blur two rewards into one between
    them that is never paid. The logits start at zero: a reward of 0 and even chances.
    """

    def __init__(self, dim: int, reward_attention: bool = False) -> None:
        super().__init__()
        self.outcome = OutcomeLayer(dim) if reward_attention else None
        self.points = nn.Linear(dim, 2 * MOST_POINTS + 1)
        self.continuation = nn.Linear(dim, 1)
        self.acceptance = AcceptanceHead(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (*self.points.parameters(), *self.continuation.parameters()):
            nn.init.zeros_(parameter)
        self.acceptance.reset_parameters()
        if self.outcome is not None:
            self.outcome.reset_parameters()

    def forward(self, h_NMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of -MOST_POINTS .. MOST_POINTS points (N, C), of continuation and of acceptance (N,)."""
        mean_ND, outcome_ND = self.read(h_NMD)
        return self.points(outcome_ND), self.continuation(outcome_ND)[:, 0], self.acceptance(mean_ND)[:, 0]

    def read(self, h_NMD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what acceptance is predicted from, and what rewards and ends are, (N, D) each.

        With reward attention, h is followed by what that returns: (N, M, 2 D).
        """
        if self.outcome is None:
            return pooled(h_NMD), pooled(h_NMD)
        h_NMD, context_NMD = h_NMD.chunk(2, -1)
        return pooled(h_NMD), self.outcome(context_NMD.mean(1))

    def predict(self, h_NMD: Tensor) -> Predictions:
        logits_NC, *chances = self(h_NMD)
        points = torch.arange(-MOST_POINTS, MOST_POINTS + 1, device=logits_NC.device, dtype=torch.float32)
        share_NC = logits_NC.float().softmax(-1)
        best = (share_NC - 1e-6 * points.abs()).argmax(-1)  # ties go to 0
        return Predictions(points[best], share_NC @ points, *(logits.float().sigmoid() for logits in chances))


class OutcomeLayer(nn.Module):
    """Compare what reward attention found: a residual layer, such as of the core, for rewards and ends."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight, std=self.up.in_features**-0.5)
        for parameter in (self.up.bias, *self.down.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, context_ND: Tensor) -> Tensor:
        """Return (N, D), every row of unit size."""
        return unit(context_ND + self.down(F.relu(self.up(unit(context_ND))).square()))


class AcceptanceHead(nn.Sequential):
    """Logit that an action is carried out. One hidden layer: it depends on the action and on what is in reach."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(dim, dim // 2), nn.SiLU(), nn.Linear(dim // 2, 1))

    def reset_parameters(self) -> None:
        hidden, out = (layer for layer in self if isinstance(layer, nn.Linear))
        nn.init.normal_(hidden.weight, std=hidden.in_features**-0.5)
        for parameter in (hidden.bias, *out.parameters()):
            nn.init.zeros_(parameter)


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
        return super().forward(pooled(h_NMD))


class MonitorHead(nn.Linear):
    """Compute g_omega, a summary of h_k as a unit vector (LoopWM, equation 20; LoopWM, section 3.5.5)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, h_NMD: Tensor) -> Tensor:
        """Return (N, D), every row of length 1."""
        return F.normalize(super().forward(pooled(h_NMD)).float(), dim=-1)  # compared with unit vectors
