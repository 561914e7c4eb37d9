"""TWISTED's world model as a program of the trainer: recorded frames in, tokens, rewards and ends predicted.

The codebook is made first, of all train frames in the order they were played (TWISTED, section 2.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopwm.core import DepthPlan
from loopwm.pixel.replay import Replay, Segments
from loopwm.pixel.twisted.checkpoint import TwistedCheckpoint
from loopwm.pixel.twisted.codebook import Growth, PatchTokenizer
from loopwm.pixel.twisted.model import TokenBatch, Twisted, TwistedCoefficients, TwistedObjective
from loopwm.pixel.twisted.training_config import TwistedTrainingConfig
from loopwm.records.errors import InputError

EVALUATION = 2**31
"""Keeps the draws of evaluation segments apart from those of training steps."""


@dataclass(frozen=True)
class TwistedBatch:
    """Segments as tokens, and the indices of their rows in the global batch."""

    segments: TokenBatch
    rows: range

    def to(self, device: torch.device) -> TwistedBatch:
        return replace(self, segments=TokenBatch(*(tensor.to(device) for tensor in self.segments)))


@dataclass(frozen=True)
class NoCursor:
    """Batches are drawn by step: there is nothing to resume from."""


class TwistedProgram:
    """TWISTED as a `Program`."""

    cursor_type = NoCursor

    def __init__(self, config: TwistedTrainingConfig) -> None:
        self.config = config
        self.micro_batches = config.batch.micro_batches
        self.train = _replay(config.data.train, "data.train")
        self.dev = _replay(config.data.dev, "data.dev") if config.data.dev else None
        if self.dev is not None:
            self.train.space.require(self.dev.space, config.data.dev)
        self.tokenizer = self._empty_tokenizer()
        self.growth = grow(self.tokenizer, self.train)
        torch.manual_seed(config.run.seed)
        self.model = Twisted(config.model, self.tokenizer.grid, self.train.space.actions)
        coefficients = TwistedCoefficients(config.objective.reward_coef, config.objective.done_coef)
        self.objective: nn.Module = TwistedObjective(self.model, coefficients)

    def _empty_tokenizer(self) -> PatchTokenizer:
        data = self.config.data
        try:
            height, width = data.patch
            return PatchTokenizer(
                self.train.space.frame_shape, (height, width), self.config.model.codes, data.threshold
            )
        except ValueError as error:
            raise InputError(f"data.patch: {error}") from error

    def global_batches(self, cursor: NoCursor, step: int) -> Iterator[tuple[list[TwistedBatch], NoCursor]]:
        batch = self.config.batch
        while True:
            yield [self._batch(self.train, step, i * batch.rows) for i in range(batch.micro_batches)], cursor
            step += 1

    def evaluation_batches(self) -> list[TwistedBatch]:
        if self.dev is None:
            return []
        rows = self.config.batch.rows
        return [self._batch(self.dev, EVALUATION, i * rows) for i in range(self.config.run.eval_batches)]

    def _batch(self, replay: Replay, step: int, first_row: int) -> TwistedBatch:
        """Segments drawn by (seed, step, row)."""
        batch = self.config.batch
        generator = np.random.default_rng((self.config.run.seed, step, first_row))
        drawn = replay.sample(batch.rows, batch.steps, generator)
        segments = tokenized(self.tokenizer, drawn)
        return TwistedBatch(segments, range(first_row, first_row + batch.rows))

    def normaliser(self, batches: Sequence[TwistedBatch]) -> float:
        return len(batches)

    def loss(
        self, objective: nn.Module, batch: TwistedBatch, step: int, normaliser: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        model, depth = self.config.model, self.config.depth
        plan = DepthPlan.sample(self.config.run.seed, step, batch.rows, model.mu_rec, model.max_loops)
        plan = replace(plan, mu_bwd=depth.backward_loops or plan.mu_bwd)
        loss, measured = objective(batch.segments, plan)
        return loss / normaliser, measured

    def evaluation(self, objective: nn.Module, batch: TwistedBatch) -> Mapping[str, Tensor]:
        """At the default depth."""
        _, measured = objective(batch.segments, self.config.model.default_depth)
        return dict(measured)

    def record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        record = {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}
        return record | {"tokens": sums["token_accuracy"][1].item()}

    def summary(self, record: Mapping[str, float]) -> str:
        right = f"tokens {record['token_accuracy']:.3f} frames {record['frame_accuracy']:.3f}"
        return f"depth {record['mean_depth']:.1f} {right}"

    def after_step(self, record: Mapping[str, float]) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def provenance(self) -> dict[str, Any]:
        return {
            "space": vars(self.train.space),
            "transitions": {"train": len(self.train), "dev": len(self.dev) if self.dev else 0},
            "codes": self.tokenizer.size,
            "patches_refused_by_a_full_codebook": self.growth.refused,
        }

    def export(self, folder: Path) -> None:
        TwistedCheckpoint(self.model, self.tokenizer, self.train.space).save(folder)


def _replay(folder: str, key: str) -> Replay:
    try:
        return Replay.from_folder(Path(folder))
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def grow(tokenizer: PatchTokenizer, replay: Replay) -> Growth:
    """Adds the patches of all frames, in the order they were played."""
    total = Growth(0, 0)
    for episode in replay.episodes():
        found = tokenizer.grow(torch.from_numpy(episode.obs))
        total = Growth(total.added + found.added, total.refused + found.refused)
    return total


def tokenized(tokenizer: PatchTokenizer, drawn: Segments) -> TokenBatch:
    """Replayed segments with tokens for frames."""
    frames = (tokenizer.encode(torch.from_numpy(frames)) for frames in (drawn.obs, drawn.next_obs))
    rest = (torch.from_numpy(x) for x in (drawn.action, drawn.reward, drawn.terminated, drawn.first))
    return TokenBatch(*frames, *rest)
