"""TWISTED as a pixel system: a growing codebook, three cross-entropies, and a world whose decoder chooses frames.

Shape suffixes: B batch, T environment steps, L patch tokens, K codes, H/W/C frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.pixel.dynamics import Depth
from loopwm.pixel.imagined import FrameWorld, Imagined
from loopwm.pixel.system import Diagnostics, FrameBatch, PixelSystem, Prepared, mean_of
from loopwm.pixel.twisted.codebook import PatchTokenizer
from loopwm.pixel.twisted.decoding import Centre, Decoder, DecoderConfig, sample
from loopwm.pixel.twisted.model import TokenBatch, Twisted, TwistedConfig, TwistedState
from loopwm.records.errors import naming
from loopwm.records.frames import FrameSpace


@dataclass(frozen=True)
class TwistedCoefficients:
    """Loss coefficients relative to the token loss: 1 on Craftax-classic, 10 on MinAtar (TWISTED, table 12)."""

    reward_coef: float = 1.0
    done_coef: float = 1.0


@dataclass(frozen=True)
class TwistedSampling:
    """Decoder of the next frame, and the region where transport applies."""

    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig("noised-transport", c_d=0.6, c_w=0.3))
    centre: Centre = field(default_factory=Centre)


class TwistedSystem(PixelSystem):
    name = "twisted"
    Model, Objective, Sampling = TwistedConfig, TwistedCoefficients, TwistedSampling

    def __init__(self, config: TwistedConfig, objective: TwistedCoefficients, space: FrameSpace) -> None:
        super().__init__(config, objective, space)
        height, width = config.patch
        self.tokenizer = PatchTokenizer(space.frame_shape, (height, width), config.codes, config.threshold)
        self.network = Twisted(config, self.tokenizer.grid, space.actions)

    def prepare(self, frames: Iterable[Tensor]) -> dict[str, float]:
        """Add patches of the frames to the codebook, in order (TWISTED, section 2.4)."""
        refused = sum(map(self.tokenizer.grow, frames))
        return {"patches_refused": refused, "codes": self.tokenizer.size}

    def prepared(self) -> Prepared:
        return {"codes": self.tokenizer.codes}

    def take_prepared(self, prepared: Prepared) -> None:
        self.tokenizer.take_codes(prepared["codes"])

    def tokenized(self, batch: FrameBatch) -> TokenBatch:
        tokens, following = self.tokenizer.encode(batch.obs), self.tokenizer.encode(batch.next_obs)
        return TokenBatch(tokens, following, batch.action, batch.reward, batch.terminated, batch.first)

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        return self.token_loss(self.tokenized(batch), depth)

    def token_loss(self, batch: TokenBatch, depth: Depth) -> tuple[Tensor, Diagnostics]:
        """Compute the mean cross-entropies of next tokens, reward class and done (TWISTED, appendix B.2).

        Truncated episodes would continue, so truncation is no target.
        """
        logits, out = self.network(batch.tokens, batch.action, batch.first, depth)
        targets = batch.next_tokens.flatten()
        tokens = F.cross_entropy(logits.tokens.flatten(0, 2), targets)
        reward = F.cross_entropy(logits.reward.flatten(0, 1), self.network.reward_class(batch.reward).flatten())
        done = F.binary_cross_entropy_with_logits(logits.done, batch.terminated.float())
        loss = tokens + self.objective.reward_coef * reward + self.objective.done_coef * done
        with torch.no_grad():
            right = logits.tokens.argmax(-1) == batch.next_tokens
            diagnostics = {
                "loss": mean_of(tokens, len(targets)),
                "reward_loss": mean_of(reward, batch.reward.numel()),
                "done_loss": mean_of(done, batch.reward.numel()),
                "token_accuracy": torch.stack((right.sum(), torch.tensor(right.numel(), device=right.device))),
                "frame_accuracy": mean_of(right.all(-1).float().mean(), batch.reward.numel()),
                "mean_depth": mean_of(out.loops.float().mean(), batch.reward.numel()),
            }
        return loss, diagnostics

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., K) from token logits; logits of unused codes are masked."""
        unused = torch.arange(logits.shape[-1], device=logits.device) >= self.tokenizer.size  # codes to come
        return logits.float().masked_fill(unused, -math.inf).softmax(-1)

    def world(self, sampling: TwistedSampling | None = None) -> TwistedWorld:
        chosen = self.sampling if sampling is None else sampling
        grid = self.tokenizer.grid
        with naming("sampling.", ValueError):
            return TwistedWorld(self, chosen.decoder.decoder(grid, chosen.centre.region(grid)))


class TwistedWorld(FrameWorld[TwistedState]):
    """World whose frames a decoder chooses from the predicted tokens."""

    def __init__(self, system: TwistedSystem, decoder: Decoder) -> None:
        self.system, self.network, self.tokenizer = system, system.network, system.tokenizer
        self.decoder = decoder
        self.depth = system.config.default_depth
        self.space = system.space

    @torch.inference_mode()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> TwistedState:
        return self.network.observe(self.tokenizer.encode(obs), action, first, self.depth)

    @torch.inference_mode()
    def step(self, state: TwistedState, action: Tensor, generator: torch.Generator) -> Imagined[TwistedState]:
        logits, cache = self.network.step(state, action, self.depth)
        tokens = self.decoder(self.system.probabilities(logits.tokens), state.tokens, generator)
        reward = sample(logits.reward[:, None].float().softmax(-1), generator)[:, 0]
        done = logits.done.float().sigmoid()
        terminated = torch.rand(done.shape, generator=generator, device=generator.device).to(done.device) < done
        after = TwistedState(cache, tokens, state.frames + 1, torch.zeros_like(terminated))
        return Imagined(self.network.rewards[reward], terminated, after)

    def show(self, state: TwistedState) -> Tensor:
        return self.tokenizer.decode(state.tokens)
