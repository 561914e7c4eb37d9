"""How probable the model finds the tokens of a prompt, as work for the engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from loopwm.core import CoreState, Fixed
from serve.batch import Passes


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities of the tokens of a prompt and of the one after it.

    chosen: of tokens 1 .. n-1; the first token has none. best, best_scores: the most probable token at 1 .. n and its
    own, where token n is the first that the model would generate.
    """

    chosen: tuple[float, ...]
    best: tuple[int, ...]
    best_scores: tuple[float, ...]


def score(passes: Passes, prompts: Sequence[tuple[int, ...]], depth: Fixed) -> Generator[None, None, list[TokenScores]]:
    """Each prompt in a pass of its own."""
    found = []
    for prompt in prompts:
        found.append(_score(passes, prompt, depth))
        yield
    return found


@torch.inference_mode()
def _score(passes: Passes, prompt: tuple[int, ...], depth: Fixed) -> TokenScores:
    out = passes.run(CoreState(1, passes.device), [prompt], depth)
    assert out.last_hidden_state is not None
    scores_LV = passes.model.lm_head(out.last_hidden_state[0]).float().log_softmax(-1)
    best_scores, best = scores_LV.max(-1)
    tokens_L = torch.tensor(prompt[1:], device=passes.device, dtype=torch.long)
    chosen = scores_LV[:-1].gather(-1, tokens_L[:, None])[:, 0]
    return TokenScores(*(tuple(values.tolist()) for values in (chosen, best, best_scores)))
