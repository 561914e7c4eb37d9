"""How the next token is chosen from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with at least that probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

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
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities = (logits_V.float().cpu() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def nucleus(probabilities_V: Tensor, top_p: float) -> Tensor:
    """The most probable tokens that together reach top_p, the others zero: (V,), not normalised."""
    ordered, index = probabilities_V.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities_V).scatter(-1, index, ordered.where(before < top_p, 0.0))
