"""Symlog two-hot: a scalar as a distribution over fixed bins, so that its loss is a cross-entropy (DreamerV3).

symlog(x) = sign(x) log(1 + |x|) is placed on BINS bins spread evenly over [-LIMIT, LIMIT]; the two bins around it share
the mass so that their mean is symlog(x). The second published version places x itself on bins symexp(-LIMIT) ..
symexp(LIMIT); here, as in the first, the shares and the mean are taken of symlogs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 255
LIMIT = 20.0
"""Largest |symlog(x)| with a bin: values beyond symexp(20) = 4.9e8 are clipped."""


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) log(1 + |x|) (DreamerV3, equation 9)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`, sign(x) (exp(|x|) - 1) (DreamerV3, equation 9)."""
    return x.sign() * x.abs().expm1()


def two_hot(x: Tensor) -> Tensor:
    """Encode values of any shape (...) as distributions over the bins, (..., BINS) float32."""
    places = (symlog(x.float()).clamp(-LIMIT, LIMIT) + LIMIT) * (BINS - 1) / (2 * LIMIT)
    return shares(places, BINS)


def shares(places: Tensor, count: int) -> Tensor:
    """Return the shares of `count` bins in places between them: (...) in bins -> (..., count).

    A hat function around each bin: the two neighbours share the mass linearly, all others get 0.
    """
    return (1 - (places[..., None] - torch.arange(count, device=places.device)).abs()).clamp(min=0)


def two_hot_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in nats of logits (..., BINS) against two-hot targets of values (...).

    Source: DreamerV3, equation 11.
    """
    return -(two_hot(target) * logits.float().log_softmax(-1)).sum(-1)


def two_hot_value(logits: Tensor) -> Tensor:
    """Return the mean of predicted distributions as symexp of the mean symlog: (..., BINS) -> (...) float32.

    DreamerV3, equation 10 takes the mean of symexps.
    """
    centres = torch.linspace(-LIMIT, LIMIT, BINS, device=logits.device)
    return symexp((logits.float().softmax(-1) * centres).sum(-1))
