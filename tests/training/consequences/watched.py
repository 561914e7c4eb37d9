"""A run with everything that passes through its objective and its optimisers, and which keys a test is about."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loopwm.core.depth import DepthPlan
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import TextObjective
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer

SHOWN: set[str] = set()
"""Keys that some test is about."""


def shows(*keys: str) -> Callable[[Any], Any]:
    SHOWN.update(keys)
    return lambda test: test


@dataclasses.dataclass
class Forward:
    """A call of the objective; depth: what the core was told."""

    training: bool
    batch: TreeBatch
    depth: DepthPlan | int
    normaliser: float


@dataclasses.dataclass
class Update:
    """A step of one optimiser. before, gradient, after: of its parameters by name; groups: its settings."""

    kind: str
    groups: list[dict[str, Any]]
    before: dict[str, Tensor]
    gradient: dict[str, Tensor]
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


class Watched:
    """A run with everything that passes through its objective and its optimisers."""

    def __init__(self, config_file: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        self.forwards: list[Forward] = []
        self.updates: list[Update] = []
        self.trainer = Trainer(load_config(config_file, overrides), TextProgram, folder)
        self.names = {id(p): name for name, p in self.trainer.objective.named_parameters()}
        with self._watching():
            self.trainer.run()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        forward = TextObjective.forward

        def watched(objective, batch, depth, normaliser):
            self.forwards.append(Forward(objective.training, batch, depth, normaliser))
            return forward(objective, batch, depth, normaliser)

        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TextObjective, "forward", watched)
            yield
        for hook in hooks:
            hook.remove()

    def _parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {self.names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}

    def _before(self, optimizer, *_: Any) -> None:
        parameters = self._parameters(optimizer)
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"names": {self.names[id(p)] for p in group["params"]}}
            for group in optimizer.param_groups
        ]
        before = {name: p.detach().clone() for name, p in parameters.items()}
        gradient = {name: p.grad.clone() for name, p in parameters.items()}
        self.updates.append(Update(type(optimizer).__name__, groups, before, gradient))

    def _after(self, optimizer, *_: Any) -> None:
        parameters, update = self._parameters(optimizer), self.updates[-1]
        update.after = {name: p.detach().clone() for name, p in parameters.items()}
        kept = {name: optimizer.state[p] for name, p in parameters.items()}
        update.state = {name: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for name, s in kept.items()}

    def steps_of(self, kind: str) -> list[Update]:
        return [update for update in self.updates if update.kind == kind]

    def gradient(self, step: int) -> dict[str, Tensor]:
        """Of all parameters, as the optimisers saw it."""
        kinds = {update.kind for update in self.updates}
        return {name: g for kind in kinds for name, g in self.steps_of(kind)[step].gradient.items()}

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def training_steps(self) -> list[list[Forward]]:
        """The forwards of each optimiser step."""
        size = self.trainer.program.micro_batches
        trained = [forward for forward in self.forwards if forward.training]
        return [trained[i : i + size] for i in range(0, len(trained), size)]


RATES = [1 / 3, 2 / 3, 1, 1, 1, 0.75, 0.5, 0.25]
"""Shares of the rate by the settings below."""

SETTINGS = [
    "model.overrides={mu_rec: 4.0, default_depth: 3}",
    "optimizer={learning_rate: 0.01, weight_decay: 0.3, beta1: 0.8, beta2: 0.7, momentum: 0.6, clip_norm: 0.05, "
    "warmup_steps: 3, decay_share: 0.5}",
    "depth={backward_loops: 3, ramp_start: 2, ramp_steps: 4}",
    "run={steps: 8, seed: 5, mixed_precision: 'no', log_every: 2, eval_every: 4, eval_batches: 3, save_every: 3, "
    "keep_checkpoints: 3}",
    "batch={rows: 6, tokens: 64, micro_batches: 2}",
]
"""All of them other than the defaults."""


def briefly(config_file: Path, folder: Path, *overrides: str) -> Watched:
    """A run of a few small steps."""
    small = ["batch={rows: 3, tokens: 64, micro_batches: 1}", "data.dev=[]", "run.steps=2"]
    return Watched(config_file, folder, [*small, *overrides])


def program_of(config_file: Path, *overrides: str) -> TextProgram:
    return TextProgram(load_config(config_file, overrides))


def rows_seen(program: TextProgram, steps: int = 25) -> Iterator[tuple[TreeBatch, int]]:
    """The micro-batches that reach the model, and an index of each of their rows."""
    for batches, _ in islice(program.global_batches(LoaderState()), steps):
        for batch in batches:
            for row in range(len(batch.row_ids)):
                yield batch, row


def loss_of(
    config_file: Path, overrides: Sequence[str], moved: bool = True
) -> tuple[float, dict[str, Tensor], TreeBatch]:
    """Loss and measurements of the first batch, with weights away from where they start."""
    torch.manual_seed(0)
    program = program_of(config_file, "batch={rows: 3, tokens: 64, micro_batches: 1}", *overrides)
    (batch,), _ = next(program.global_batches(LoaderState()))
    program.objective.remember_first_step(1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in program.objective.parameters() if moved else ():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        loss, measured = program.loss(program.objective, batch, 0, 100.0)
    return loss.item(), measured, batch
