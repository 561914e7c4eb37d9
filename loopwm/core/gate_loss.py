"""What teaches an exit gate: each returns (loss, diagnostics).

Losses that go with the training of a model are sums over decisions, for the caller to divide by a count over its whole
global batch, so that they do not depend on how it is cut; their diagnostics are pairs (sum, count).

While the model trains: the paper's regulariser, or the expected loss over the exit distribution. Afterwards, with the
model frozen: continue labels. The regulariser alone has one optimum, every gate at 0.5; it says nothing about when to
stop, so a gate trained by it needs the second stage.

Shape suffixes: N decisions, S loops that carry gradients, T all loops of a pass. Gate logits (N, S) are NaN in loops
that a row does not run; these come first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LABEL_SLOPE = 50.0
LABEL_MARGIN = 0.005
"""Nats a loop must gain for its continue label to pass one half, and how sharply it does (Ouro, section 3.4).

A loop that gains nothing is still labelled sigmoid(-0.25) = 0.44, so a fitted gate hardly passes 0.56: thresholds that
tell anything apart lie below.
"""


def gate_entropy_loss(gate_logits_NS: Tensor, alpha: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-alpha sum_t H(g^(t)) with binary entropy H in nats (LoopWM, equation 11), summed over loops and decisions.

    The paper sums over all T loops, this over those that carry gradients. Diagnostics, of a loop: gate and
    gate_entropy.
    """
    ran = gate_logits_NS.isfinite()
    logits = gate_logits_NS[ran]
    gate = logits.sigmoid()
    entropy = -(gate * F.logsigmoid(logits) + (1 - gate) * F.logsigmoid(-logits))
    return -alpha * entropy.sum(), {"gate": _pair(gate), "gate_entropy": _pair(entropy)}


def exit_log_distribution(gate_logits_NS: Tensor) -> Tensor:
    """log p_t, p_t = g_t prod_{s<t}(1 - g_s) renormalised over the loops given: (N, S), -inf in loops not run.

    Ouro, equation 3 gives what is left of the probability to the last loop instead.
    """
    ran = gate_logits_NS.isfinite()
    logits = gate_logits_NS.where(ran, 0.0)
    stayed = F.logsigmoid(-logits).where(ran, 0.0).cumsum(-1)
    before = F.pad(stayed[..., :-1], (1, 0))
    return (F.logsigmoid(logits) + before).where(ran, -math.inf).log_softmax(-1)


def expected_exit_loss(gate_logits_NS: Tensor, loss_NS: Tensor, alpha: float) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t p_t loss_t - alpha H(p) (Ouro, equation 4), summed. loss_NS: the loss had the row left after each loop.

    Diagnostics: gate, of a loop; exit_entropy and expected_loss, of a decision.
    """
    log_p = exit_log_distribution(gate_logits_NS)
    ran = log_p.isfinite()
    p = log_p.exp()
    entropy_N = -(p * log_p.where(ran, 0.0)).sum(-1)
    expected_N = (p * loss_NS.where(ran, 0.0)).sum(-1)
    gate = gate_logits_NS[ran].sigmoid()
    diagnostics = {"gate": _pair(gate), "exit_entropy": _pair(entropy_N), "expected_loss": _pair(expected_N)}
    return (expected_N - alpha * entropy_N).sum(), diagnostics


def _pair(values: Tensor) -> Tensor:
    """Sum and number of some values: (2,) float32."""
    return torch.stack((values.detach().sum().float(), torch.tensor(float(values.numel()), device=values.device)))


def continue_labels(loss_NT: Tensor) -> Tensor:
    """w_t = sigmoid(50 (I_t - 0.005)), I_t = max(0, loss_{t-1} - loss_t), for t = 2 .. T: (N, T - 1).

    Ouro, equation 5 is I_t; the label follows it.
    """
    gain = (loss_NT[:, :-1] - loss_NT[:, 1:]).clamp(min=0)
    return torch.sigmoid(LABEL_SLOPE * (gain - LABEL_MARGIN))


def continue_loss(gate_logits_NT: Tensor, loss_NT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean binary cross-entropy of 1 - g^(t) against the continue labels, t >= 2 (Ouro, equation 6)."""
    labels, logits = continue_labels(loss_NT), gate_logits_NT[:, 1:]
    loss = F.binary_cross_entropy_with_logits(-logits, labels)
    return loss, {"gate": logits.detach().sigmoid().mean(), "label": labels.mean()}
