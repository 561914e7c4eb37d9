"""Losses of true observations: how probable a world model finds what really happened."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core.exit_rules import Fixed
from loopwm.records import template
from loopwm.text.world import WorldModel
from loopwm.text.world_batch import World, same_length
from loopwm.worlds.local import LocalWorlds


@torch.inference_mode()
def nll(model: WorldModel, world: World, observations: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the teacher-forced loss -log p of each row's observation with its `<|end|>`, and its number of tokens.

    Both (B,), the loss float32. Tokens loop to the limit of the world's rule. `world` stays valid.
    """
    same_length("observations", observations, world)
    texts = [template.OBS + template.clean(text) + template.END for text in observations]
    hidden = model._feed(model.before_decoding(world), texts, Fixed(world.depth.limit)).hidden
    losses, counts = [], []
    for row, text in zip(hidden, texts, strict=True):
        targets = torch.tensor(model._ids(text)[1:], device=row.device)
        logits = model.model.lm_head(row[-len(targets) - 1 : -1])
        losses.append(F.cross_entropy(logits.float(), targets, reduction="sum"))
        counts.append(len(targets))
    return torch.stack(losses), torch.tensor(counts, device=hidden.device)


def nll_of_rows(worlds: LocalWorlds, observations: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return `nll` of each row's observation after its last step."""
    rows = [nll(worlds._model, world, [text]) for world, text in zip(worlds._now, observations, strict=True)]
    losses, counts = zip(*rows, strict=True)
    return torch.cat(losses), torch.cat(counts)
