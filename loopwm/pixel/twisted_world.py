"""A TWISTED checkpoint as a world that imagination steps through.

Shape suffixes: B batch, T environment steps, L patch tokens, K codes, H/W/C frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loopwm.core import ExitRule
from loopwm.pixel.checkpoint import TwistedCheckpoint
from loopwm.pixel.decoding import Decoder, sample
from loopwm.pixel.imagined import Imagined
from loopwm.pixel.twisted import Imagining


class TwistedWorld:
    """A `FrameWorld`: frames in, the frame after an action out, as its decoder makes it of the predicted tokens."""

    def __init__(self, checkpoint: TwistedCheckpoint, decoder: Decoder, depth: int | ExitRule | None = None) -> None:
        """depth: loops of every pass, None for the checkpoint's. Raises ValueError for one it does not allow."""
        self.checkpoint = checkpoint
        self.model, self.tokenizer = checkpoint.model, checkpoint.tokenizer
        self.decoder = decoder
        self.depth = self.model.dynamics.core.check(self.model.config.default_depth if depth is None else depth)
        self.space = checkpoint.space

    @torch.inference_mode()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> Imagining:
        """obs: uint8 (B, T, H, W, C), action: (B, T - 1), first: (B, T)."""
        return self.model.observe(self.tokenizer.encode(obs), action, first, self.depth)

    @torch.inference_mode()
    def step(self, state: Imagining, action: Tensor, generator: torch.Generator) -> Imagined[Imagining]:
        """The state given stays as it is."""
        logits, cache = self.model.step(state, action, self.depth)
        tokens = self.decoder(self.checkpoint.probabilities(logits.tokens), state.tokens, generator)
        reward = sample(logits.reward[:, None].float().softmax(-1), generator)[:, 0]
        done = logits.done.float().sigmoid()
        terminated = torch.rand(done.shape, generator=generator, device=generator.device).to(done.device) < done
        after = Imagining(cache, tokens, state.frames + 1, torch.zeros_like(terminated))
        return Imagined(self.tokenizer.decode(tokens), self.model.rewards[reward], terminated, after)

    def replace(self, state: Imagining, rows: Tensor, fresh: Imagining) -> Imagining:
        return state.replace(rows, fresh)
