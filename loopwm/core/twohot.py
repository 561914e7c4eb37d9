"""Symlog two-hot: a scalar as a distribution over fixed bins (DreamerV3), so that its loss is a cross-entropy.

symlog(x) = sign(x) log(1 + |x|) is laid on BINS bins spread evenly over [-LIMIT, LIMIT]; the two bins around it share
the mass so that their mean is symlog(x) again. The published second version lays x itself on bins symexp(-LIMIT) ..
symexp(LIMIT); here, as in its first, both the shares and the mean are taken of symlogs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 255
LIMIT = 20.0
"""Largest |symlog(x)| there is a bin for: values beyond symexp(20) = 4.9e8 are cut."""


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|) (DreamerV3, equation 9)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`: sign(x) (exp(|x|) - 1) (DreamerV3, equation 9)."""
    return x.sign() * x.abs().expm1()


def two_hot(x: Tensor) -> Tensor:
    """Distributions over the bins for values of any shape (...): (..., BINS) float32."""
    places = (symlog(x.float()).clamp(-LIMIT, LIMIT) + LIMIT) * (BINS - 1) / (2 * LIMIT)
    bins = torch.arange(BINS, device=x.device)
    return (1 - (places[..., None] - bins).abs()).clamp(min=0)


def two_hot_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits (..., BINS) against the two-hot targets of values (...): (...), in nats (DreamerV3,
    equation 11)."""
    return -(two_hot(target) * logits.float().log_softmax(-1)).sum(-1)


def two_hot_value(logits: Tensor) -> Tensor:
    """The value of predicted distributions, symexp of their mean: (..., BINS) -> (...) float32 (DreamerV3, equation 10
    has the mean of symexps)."""
    return symexp((logits.float().softmax(-1) * _centres(logits)).sum(-1))


def two_hot_mode(logits: Tensor) -> Tensor:
    """The likeliest value of predicted distributions, symexp of the mean of the two neighbouring bins with the most
    mass: (..., BINS) -> (...) float32.

    Where a reward is all or nothing, the mean of the whole is one that never is. Of equals the one next to 0 counts.
    """
    shares, centres = (bins.unfold(-1, 2, 1) for bins in (logits.float().softmax(-1), _centres(logits)))
    best = (shares.sum(-1) - 1e-6 * centres.mean(-1).abs()).argmax(-1, keepdim=True)
    pair = shares.gather(-2, best[..., None].expand(*best.shape, 2))[..., 0, :]
    return symexp((pair * centres[best[..., 0]]).sum(-1) / pair.sum(-1))


def _centres(logits: Tensor) -> Tensor:
    return torch.linspace(-LIMIT, LIMIT, BINS, device=logits.device)
