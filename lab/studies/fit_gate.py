"""Fit the exit gate of a finished model, which stays frozen (Ouro, section 3.4).

One pass of T loops gives h^(1) .. h^(T), and each is read out and scored. The gain of loop t is the label for running
it: for a decoded token by its own loss, for a transition by the mean loss of the observation decoded there. Both kinds
of decision count equally, whatever the length of observations.

Shape suffixes: B rows, L columns, N decisions, T loops, D width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from lab.studies.gate_loss import continue_labels, continue_loss
from loopwm.core.exit_rules import ExitGate
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.runtime import use_device
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.data.tree import IGNORED
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import one_pass_mask
from loopwm.text.training.program import TextProgram, export_model

EXAMPLE = (
    "python -m lab fit-gate --model loopwm/pretrained --config configs/text-small.yaml --steps 100 --out runs/gated"
)


@dataclass(frozen=True)
class Decisions:
    """Exit decisions. states: (N, T, D), pooled, after every loop. loss: (N, T), after exit there."""

    states: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Fit:
    """Result on held-out decisions.

    loss: binary cross-entropy of the gate; constant: of the best gate that ignores the state; gates and labels: means
    for t = 2 .. T.
    """

    loss: float
    constant: float
    gates: tuple[float, ...]
    labels: tuple[float, ...]


def with_gate(model: LoopWMForCausalLM) -> tuple[LoopWMForCausalLM, ExitGate]:
    """Return the frozen model and its gate, the only trainable part; a new gate if the model has none."""
    weights = model.state_dict()
    gated = LoopWMForCausalLM(LoopWMConfig.from_dict(model.config.to_dict() | {"exit_gate": True})).eval()
    gate = gated.model.core.gate
    assert gate is not None
    fresh = {f"model.core.gate.{name}": value for name, value in gate.state_dict().items()}
    gated.load_state_dict(fresh | weights)
    gated.requires_grad_(False)
    gate.requires_grad_(True)
    return gated, gate


@torch.no_grad()
def decisions(model: LoopWMForCausalLM, batch: TreeBatch, limit: int) -> tuple[Decisions, Decisions]:
    """Return the decisions of a batch's decoded tokens, and those of its transitions."""
    mask = one_pass_mask(model.config, batch)
    depths = range(1, limit + 1)
    outs = [model.model(batch.tokens, mask, batch.positions, use_cache=False, depth=depth) for depth in depths]
    states = [out.state for out in outs]
    wanted = batch.label != IGNORED
    losses = []
    for out in outs:
        logits = model.lm_head(out.last_hidden_state[wanted])
        losses.append(F.cross_entropy(logits.float(), batch.label[wanted], reduction="none"))
    loss_NT = torch.stack(losses, dim=1)
    tokens = Decisions(torch.stack([state[wanted] for state in states], dim=1), loss_NT)
    return tokens, _transitions(batch, states, loss_NT)


def _transitions(batch: TreeBatch, states: Sequence[Tensor], loss_NT: Tensor) -> Decisions:
    """Return one decision for each step of branches and trunk whose observation is a target."""
    wanted = batch.label != IGNORED
    loss_BLT = loss_NT.new_zeros(*wanted.shape, loss_NT.shape[1], dtype=torch.float64)
    loss_BLT[wanted] = loss_NT.double()
    # Sums over an observation as differences of a cumulative sum, in float64 against cancellation.
    before = F.pad(loss_BLT.cumsum(1), (0, 0, 1, 0))
    parts = []
    for steps in (batch.steps, batch.trunk_steps):
        at = steps.supervised
        row, start, count = steps.row[at], steps.columns[at, -1] + 1, steps.observation_length[at] - 1
        mean = (before[row, start + count] - before[row, start]) / count[:, None]
        parts.append((torch.stack([steps.at_slots(state)[at].mean(1) for state in states], dim=1), mean.float()))
    state, loss = (torch.cat(part) for part in zip(*parts, strict=True))
    return Decisions(state, loss)


def gate_loss(gate: ExitGate, batches: Sequence[tuple[Decisions, ...]]) -> Tensor:
    """Return the mean over kinds of decisions of their mean loss in all batches, independent of the cut into batches.

    batches: the kinds of each.
    """
    kinds = [[part for part in kind if len(part.loss)] for kind in zip(*batches, strict=True)]
    return torch.stack([_mean_loss(gate, parts) for parts in kinds if parts]).mean()


def _mean_loss(gate: ExitGate, parts: Sequence[Decisions]) -> Tensor:
    """Return the mean loss of all decisions of the parts, none of which is empty."""
    decided = sum(len(part.loss) for part in parts)
    return torch.stack([continue_loss(gate(p.states), p.loss)[0] * (len(p.loss) / decided) for p in parts]).sum()


def _rms(states: Sequence[Tensor]) -> float:
    """Return the root mean square of all elements."""
    squares = sum(state.double().square().sum().item() for state in states)
    return math.sqrt(squares / sum(state.numel() for state in states))


def fit_gate(
    model: LoopWMForCausalLM,
    gate: ExitGate,
    batches: Iterator[Sequence[TreeBatch]],
    steps: int,
    limit: int,
    rate: float,
) -> None:
    """Fit the gate by Adam, one step a global batch; the rate falls linearly to zero.

    The weights' rate is relative to 1 / rms(h), so that it suits models whose states differ in size.
    """
    groups: list[dict[str, Any]] = [{"params": [gate.linear.weight]}, {"params": [gate.linear.bias]}]
    optimizer = torch.optim.Adam(groups)
    units = (1.0, 1.0)
    bar = tqdm(range(steps), unit="step")
    for step in bar:
        kinds_by_batch = [decisions(model, batch.to(model.device), limit) for batch in next(batches)]
        if step == 0:
            units = (1 / _rms([tokens.states for tokens, _ in kinds_by_batch]), 1.0)
        for group, unit in zip(optimizer.param_groups, units, strict=True):
            # Linear to zero: Adam's last steps would otherwise jitter around the optimum.
            group["lr"] = rate * unit * (1 - step / steps)
        loss = gate_loss(gate, kinds_by_batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix_str(f"loss {loss.item():.4f}")


@torch.no_grad()
def judge(kinds: Sequence[Decisions], gate: ExitGate) -> Fit:
    """Evaluate the gate on decisions of one kind."""
    states, losses = (torch.cat(part) for part in zip(*((k.states, k.loss) for k in kinds), strict=True))
    labels = continue_labels(losses)
    best = labels.mean(0).expand_as(labels)
    return Fit(
        loss=continue_loss(gate(states), losses)[0].item(),
        constant=F.binary_cross_entropy(best, labels).item(),
        gates=tuple(gate(states).sigmoid().mean(0)[1:].tolist()),
        labels=tuple(labels.mean(0).tolist()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--config", type=Path, required=True, help="training configuration, for data, batch and seed")
    parser.add_argument("--steps", type=int, required=True, help="global batches to fit on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")
    parser.add_argument("--limit", type=int, help="deepest loop T (default: 2 mu_rec)")
    parser.add_argument("--rate", type=float, default=3e-3, help="first learning rate (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")


def run(arguments: argparse.Namespace) -> None:
    """Load, fit, evaluate on the dev shards and write the checkpoint. Raises InputError."""
    if arguments.out.exists():
        raise InputError(f"--out: {arguments.out} exists already")
    if arguments.steps < 1:
        raise InputError(f"--steps: must be at least 1, got {arguments.steps}")
    config = load_config(arguments.config, arguments.overrides)
    source, tokenizer = load_checkpoint(arguments.model)
    limit = arguments.limit or min(source.config.max_loops, round(2 * source.config.mu_rec))
    if not 2 <= limit <= source.config.max_loops:
        raise InputError(f"--limit: must be 2 to max_loops = {source.config.max_loops}, got {limit}")
    program = TextProgram(config)
    if source.config.propagate != "none":
        raise InputError(f"--model: must have propagate none, got {source.config.propagate}")
    for key in ("state_slots", "slots_in_trunk", "propagate"):
        if getattr(program.model_config, key) != (has := getattr(source.config, key)):
            raise InputError(f"model.overrides.{key}: must be {has} as in the checkpoint")
    torch.manual_seed(config.run.seed)
    model, gate = with_gate(source)
    device = use_device("auto")
    model.to(device)  # type: ignore[arg-type]  # the wrapper of transformers hides the signature
    batches = (group for group, _ in program.global_batches(LoaderState()))
    fit_gate(model, gate, batches, arguments.steps, limit, arguments.rate)
    report = {"model": str(arguments.model), "steps": arguments.steps, "limit": limit, "seed": config.run.seed}
    held_out = [decisions(model, b.rows.to(model.device), limit) for b in program.evaluation_batches()]
    for name, kinds in zip(("tokens", "transitions"), zip(*held_out, strict=True), strict=False):
        fit = judge(kinds, gate)
        report[name] = asdict(fit)
        print(f"{name}: dev loss {fit.loss:.4f}, of a constant gate {fit.constant:.4f}")
    learned = program.training_episodes
    export_model(model, tokenizer, arguments.out, learned and learned.joined(TrainingEpisodes.load(arguments.model)))
    write_json(arguments.out / "gate.json", report)
