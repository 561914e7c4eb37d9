"""Interface between trainer and system: a text world, or a pixel world, is a `Program`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from loopwm.trainer.config import OptimizerConfig, RunConfig


class SystemConfig(Protocol):
    """Sections that every system's configuration has; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def run(self) -> RunConfig: ...


class MicroBatch(Protocol):
    def to(self, device: torch.device) -> Self: ...


class Program(Protocol):
    """Builds model and objective, streams global batches, computes losses and measurements.

    A global batch is a list of micro-batches with the loader state after it, to resume from. Measurements are sums over
    micro-batches and processes, which `record` converts to numbers to log.
    """

    @property
    def objective(self) -> nn.Module: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def loader_state_type(self) -> type[Any]:
        """Dataclass of the loader state; without arguments it is the start."""

    def size(self) -> str:
        """Return the size of the model in one line, printed before the first step."""

    def global_batches(self, loader_state: Any, step: int, processes: int) -> Iterator[tuple[list[Any], Any]]:
        """Yield global batches from optimiser step `step` on, each with the loader state after it.

        Process i of `processes` takes the micro-batches i, i + processes, ..
        """

    def evaluation_batches(self) -> list[Any]:
        """Return the same batches every time; empty if there is nothing to evaluate on."""

    def normaliser(self, batches: Sequence[Any]) -> float:
        """Return the divisor of the losses of a global batch's micro-batches, so that they can be added."""

    def loss(
        self, objective: nn.Module, batch: Any, step: int, normaliser: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss and measurements of a micro-batch. `objective`: wrapped for the processes."""

    def evaluation(self, objective: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Measure an evaluation batch."""

    def record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Convert summed measurements to numbers to log: at least `loss` and `tokens`.

        `flops` of a training step, if known, are logged as rates.
        """

    def summary(self, record: Mapping[str, float]) -> str:
        """Format a few of these for the progress bar."""

    def after_step(self, record: Mapping[str, float]) -> dict[str, float]:
        """Update state that outlasts an optimiser step from its numbers over all processes; return more to log."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint besides the objective, as JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def provenance(self) -> dict[str, Any]:
        """Return hashes of the data."""

    def export(self, folder: Path) -> None:
        """Write the trained model; the folder appears complete or not at all."""
