"""What the trainer needs of a system: a text world, or a pixel world, is a `Program`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from loopwm.trainer.config import OptimizerConfig, RunConfig


class SystemConfig(Protocol):
    """The sections that every system's configuration has; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def run(self) -> RunConfig: ...


class MicroBatch(Protocol):
    def to(self, device: torch.device) -> Self: ...


class Program(Protocol):
    """Builds model and objective, streams global batches, gives each its loss, reads out what was measured.

    Batches are lists of micro-batches with a loader_state behind them to resume from. Measurements are sums over
    micro-batches, processes included, that `record` turns into numbers to log.
    """

    @property
    def objective(self) -> nn.Module: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def loader_state_type(self) -> type[Any]:
        """A dataclass; without arguments it stands at the beginning."""
        ...

    def size(self) -> str:
        """Return the size of the model in one line, printed before the first step."""
        ...

    def global_batches(self, loader_state: Any, step: int, processes: int) -> Iterator[tuple[list[Any], Any]]:
        """Those from optimiser step `step` on, each with the loader_state after it; process i of so many takes the
        micro-batches i, i + processes, .."""
        ...

    def evaluation_batches(self) -> list[Any]:
        """The same every time; empty if there is nothing to evaluate on."""
        ...

    def normaliser(self, batches: Sequence[Any]) -> float:
        """What losses of the micro-batches of a global batch are divided by, so that they may be added."""
        ...

    def loss(
        self, objective: nn.Module, batch: Any, step: int, normaliser: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a micro-batch at an optimiser step, and measurements. `objective`: wrapped for the processes."""
        ...

    def evaluation(self, objective: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Measurements of an evaluation batch."""
        ...

    def record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Added measurements as numbers to log: at least `loss` and `tokens`. `flops` of a training step, where they
        are known, are logged as rates."""
        ...

    def summary(self, record: Mapping[str, float]) -> str:
        """A few of these for the progress bar."""
        ...

    def after_step(self, record: Mapping[str, float]) -> dict[str, float]:
        """Takes what outlasts an optimiser step from its numbers over all processes; more to log."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the objective, as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def provenance(self) -> dict[str, Any]:
        """Hashes of what the model is made from."""
        ...

    def export(self, folder: Path) -> None:
        """Writes the trained model; the folder appears as a whole or not at all."""
        ...
