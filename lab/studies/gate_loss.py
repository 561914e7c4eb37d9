"""Second-stage losses of the exit gate: fit it to continue labels with the model frozen (Ouro, section 3.4).

The first stage of the papers, the entropy regulariser or the expected loss over exits while the model trains, is not
built: the regulariser alone drives every gate to 0.5.

Shape suffixes: N decisions, T loops of a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LABEL_SLOPE = 50.0
LABEL_MARGIN = 0.005
"""Nats that a loop must gain for a continue label above one half, and the label's slope (Ouro, section 3.4).

A loop without gain is still labelled sigmoid(-0.25) = 0.44, so a fitted gate hardly exceeds 0.56: use thresholds below.
"""


def continue_labels(loss_NT: Tensor) -> Tensor:
    """Return w_t = sigmoid(50 (I_t - 0.005)), I_t = max(0, loss_{t-1} - loss_t), t = 2 .. T: (N, T - 1).

    I_t is Ouro, equation 5; the label follows it.
    """
    gain = (loss_NT[:, :-1] - loss_NT[:, 1:]).clamp(min=0)
    return torch.sigmoid(LABEL_SLOPE * (gain - LABEL_MARGIN))


def continue_loss(gate_logits_NT: Tensor, loss_NT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean binary cross-entropy of 1 - g^(t) against the continue labels, t >= 2 (Ouro, equation 6)."""
    labels, logits = continue_labels(loss_NT), gate_logits_NT[:, 1:]
    loss = F.binary_cross_entropy_with_logits(-logits, labels)
    return loss, {"gate": logits.detach().sigmoid().mean(), "label": labels.mean()}
