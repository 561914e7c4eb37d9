"""How the next token is chosen from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures so small are greedy: logits divided by them are no numbers any more."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Else tokens are drawn that pass all of these: min_p, probability as a share of the most
    probable one's; top_k, rank, 0 for any; top_p, the smallest set that has at least this probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0

    def generator(self) -> torch.Generator:
        """A fresh random source: the same for the same seed, different each time without one."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits (V,). The draw depends on the request's own generator and on nothing else."""
    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    probabilities = (logits_V.float().cpu() / sampling.temperature).softmax(-1)
    if sampling.min_p > 0:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0.0)
    if 0 < sampling.top_k < len(probabilities):
        probabilities = best(probabilities, sampling.top_k)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def best(probabilities_V: Tensor, count: int) -> Tensor:
    """The `count` most probable tokens, the others zero: (V,), not normalised."""
    values, index = probabilities_V.topk(count)
    return torch.zeros_like(probabilities_V).scatter(-1, index, values)


def nucleus(probabilities_V: Tensor, top_p: float) -> Tensor:
    """The most probable tokens that together reach the share top_p, the others zero: (V,), not normalised."""
    ordered, index = probabilities_V.sort(descending=True)
    before = (ordered.cumsum(-1) - ordered) / ordered.sum()
    before[0] = -1.0  # the first always counts: a top_p that rounds to zero would leave nothing
    return torch.zeros_like(probabilities_V).scatter(-1, index, ordered.where(before < top_p, 0.0))
