"""How probable the model finds the tokens of a prompt, as work for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loopwm.core import CoreState, Fixed
from serve.engine.batch import Passes
from serve.engine.jobs import Steps


@dataclass(frozen=True)
class TokenScores:
    """Natural log-probabilities of the tokens of a prompt and of those most probable after it.

    chosen: of tokens 1 .. n-1; the first token has none. tops: at 1 .. n the most probable tokens with theirs, at least
    one, the best first, where token n is the first that the model would generate.
    """

    chosen: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def next(self) -> tuple[int, float]:
        """The most probable token behind the prompt."""
        return self.tops[-1][0]


def score(passes: Passes, prompts: Sequence[tuple[int, ...]], depth: Fixed, top: int) -> Steps[list[TokenScores]]:
    """Each prompt in a pass of its own. top: how many of the most probable tokens to tell at each place."""
    found = []
    for prompt in prompts:
        yield None
        found.append(_score(passes, prompt, depth, max(top, 1)))
    return found


@torch.inference_mode()
def _score(passes: Passes, prompt: tuple[int, ...], depth: Fixed, top: int) -> TokenScores:
    out = passes.run(CoreState(1, passes.device), [prompt], depth)
    assert out.last_hidden_state is not None
    scores_LV = passes.model.lm_head(out.last_hidden_state[0]).float().log_softmax(-1)
    values_LK, ids_LK = scores_LV.topk(min(top, scores_LV.shape[-1]))
    tokens_L = torch.tensor(prompt[1:], device=passes.device, dtype=torch.long)
    chosen = scores_LV[:-1].gather(-1, tokens_L[:, None])[:, 0]
    rows = zip(ids_LK.tolist(), values_LK.tolist(), strict=True)
    tops = tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)
    return TokenScores(tuple(chosen.tolist()), tops)
