"""Training program of pixel world models: samples segments of recorded frames and computes the system's loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loopwm.pixel.checkpoint import save_checkpoint
from loopwm.pixel.replay import Replay, rewarded
from loopwm.pixel.system import FrameBatch, make_system
from loopwm.pixel.training_config import PixelTrainingConfig
from loopwm.records.errors import InputError, naming

EVALUATION = 2**31
"""Step number of evaluation segments, outside the range of training steps, so that their seeds differ."""


@dataclass(frozen=True)
class Rows:
    """Segments, the indices of their rows in the global batch, and the seed of all randomness in their loss."""

    frames: FrameBatch
    rows: range
    seed: tuple[int, ...]

    def to(self, device: torch.device) -> Rows:
        return replace(self, frames=self.frames.to(device))

    def generator(self) -> torch.Generator:
        return seeded(self.frames.action.device, *self.seed)


def seeded(device: torch.device, *seed: int) -> torch.Generator:
    """Create a generator seeded by several numbers."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))


@dataclass(frozen=True)
class NoLoaderState:
    """Empty loader state: batches are a function of the step, so there is nothing to resume."""


class PixelProgram:
    """Any pixel system as a `Program`; the objective is the system itself."""

    loader_state_type = NoLoaderState

    def __init__(self, config: PixelTrainingConfig) -> None:
        """Load the data and create the system. Raises InputError, naming the key, if a section does not fit."""
        self.config = config
        self.micro_batches = config.batch.micro_batches
        self.train = _replay(config.data.train, "data.train")
        self.dev = _replay(config.data.dev, "data.dev") if config.data.dev else None
        if self.dev is not None:
            self.train.space.require(self.dev.space, config.data.dev)
        torch.manual_seed(config.run.seed)
        self.objective = make_system(config.system, config.model, config.objective, self.train.space)
        if config.batch.steps < self.objective.shortest:
            raise InputError(f"batch.steps: must be at least {self.objective.shortest}, got {config.batch.steps}")
        self.preparation = self.objective.prepare(torch.from_numpy(e.obs) for e in self.train.episodes())

    def size(self) -> str:
        return f"{sum(p.numel() for p in self.objective.parameters()) / 1e6:.1f}M parameters"

    def global_batches(
        self, loader_state: NoLoaderState, step: int, processes: int = 1
    ) -> Iterator[tuple[list[Rows], NoLoaderState]]:
        batch = self.config.batch
        while True:
            yield [self._batch(self.train, step, i * batch.rows) for i in range(batch.micro_batches)], loader_state
            step += 1

    def evaluation_batches(self) -> list[Rows]:
        if self.dev is None:
            return []
        rows = self.config.batch.rows
        return [self._batch(self.dev, EVALUATION, i * rows) for i in range(self.config.run.eval_batches)]

    def _batch(self, replay: Replay, step: int, first_row: int) -> Rows:
        """Sample segments by (seed, step, row)."""
        batch, seed = self.config.batch, (self.config.run.seed, step, first_row)
        rng, following = np.random.default_rng(seed), self.objective.reads_following
        segments = replay.sample(batch.rows, batch.steps, rng, following=following)
        frames = FrameBatch.of(rewarded(segments, self.config.data.rewards))
        return Rows(frames, range(first_row, first_row + batch.rows), seed)

    def normaliser(self, batches: Sequence[Rows]) -> float:
        return len(batches)

    def loss(
        self, objective: nn.Module, batch: Rows, step: int, normaliser: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        plan = self.objective.plan(self.config.run.seed, step, batch.rows)
        loss, measured = objective(batch.frames, plan, batch.generator())
        return loss / normaliser, measured

    def evaluation(self, objective: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Evaluate at the default depth."""
        _, measured = objective(batch.frames, self.objective.looped.default_depth, batch.generator())
        return dict(measured)

    def record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        record = {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}
        return record | {"tokens": sums["loss"][1].item()}

    def summary(self, record: Mapping[str, float]) -> str:
        shown = (name for name in record if name.endswith(("accuracy", "_loss")))
        return " ".join(f"{name.removesuffix('_loss')} {record[name]:.3f}" for name in shown)

    def after_step(self, record: Mapping[str, float]) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.tolist() for name, part in self.objective.prepared().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what the weights were trained with, and go on from it with the data of this run."""
        if state:
            self.objective.take_prepared({name: torch.tensor(part, dtype=torch.uint8) for name, part in state.items()})
            self.preparation = self.objective.prepare(torch.from_numpy(e.obs) for e in self.train.episodes())

    def provenance(self) -> dict[str, Any]:
        return {
            "space": vars(self.train.space),
            "transitions": {"train": len(self.train), "dev": len(self.dev) if self.dev else 0},
            **self.preparation,
        }

    def export(self, folder: Path) -> None:
        save_checkpoint(self.objective, folder)


def _replay(folder: str, key: str) -> Replay:
    with naming(f"{key}: "):
        return Replay.from_folder(Path(folder))
