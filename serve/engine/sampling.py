"""Sampling parameters, and sampling the next token from logits.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits divided by them overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Options of text generation.

    temperature: 0 is greedy.
    top_p: smallest set of tokens with at least this probability.
    seed: seed of the request's generator; None for a different one each time.
    top_k: number of most probable tokens to sample from; 0 for all.
    min_p: least probability, relative to the most probable token's.
    max_tokens: at least 1; None for all that fit, up to the service's default.
    min_tokens: tokens before the end token and `stops` may end the text.
    ignore_end: never sample the end token.
    logprobs: number of alternatives scored at each token; None for no scores.
    likelier: answer the likelier of two texts (`loopwm.text.decoding`); needs temperature 0 and two `logprobs`.
    stops: strings that end the text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_end: bool = False
    logprobs: int | None = None
    likelier: bool = False
    stops: tuple[str, ...] = ()

    def generator(self) -> torch.Generator:
        """Return a new random generator, seeded with `seed` if given."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Sample one token id. Depends only on the logits and the request's generator, not on the batch."""
    if params.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    # On the CPU in float32: generators are the CPU's, so that a seed gives the same text on every device.
    probabilities = (logits_V.float().cpu() / params.temperature).softmax(-1)
    if params.min_p > 0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
    if 0 < params.top_k < len(probabilities):
        values, index = probabilities.topk(params.top_k)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, values)
    if params.top_p < 1:
        probabilities = keep_top_p(probabilities, params.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def keep_top_p(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Zero all but the most probable tokens that together reach `top_p`; does not renormalise."""
    ordered, index = probabilities_V.sort(descending=True)
    before = (ordered.cumsum(-1) - ordered) / ordered.sum()
    before[0] = -1.0  # keep the first token always: a top_p that rounds to zero would leave none
    return torch.zeros_like(probabilities_V).scatter(-1, index, ordered.where(before < top_p, 0.0))
