"""Fit the reward head of a finished model, which stays frozen.

One pass over training rows gives h_k at every supervised step; the head is fitted to them by Adam and judged on the dev
shards beside the head that the model had.

Shape suffixes: N steps, D width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from lab.studies.fit_acceptance import heads_of
from loopwm.records.command import above_zero, positive
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import MOST_POINTS, PredictionHeads
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import Outcomes, run_rows
from loopwm.text.training.program import TextProgram, export_model

EXAMPLE = (
    "python -m lab fit-rewards --model loopwm/pretrained --config configs/reference.yaml --steps 100 --out runs/fit"
)

BATCH = 512


@dataclass(frozen=True)
class Steps:
    """Supervised steps with a recorded reward. latent: (N, D), read by the head; points: (N,), their classes."""

    latent: Tensor
    points: Tensor


@torch.inference_mode()
def read_steps(model: LoopWMForCausalLM, batches: Iterable[TreeBatch]) -> Steps:
    """Run the model at its default depth; return the steps of branches and trunks."""
    parts = []
    for batch in batches:
        groups = (batch.steps, batch.trunk_steps)
        out = run_rows(model.model, batch, model.config.default_depth)
        outcomes = Outcomes.of(groups)
        latent = torch.cat([heads_of(model).read(steps.at_slots(out.latent))[1] for steps in groups])
        reward = outcomes.reward[outcomes.recorded].clamp(-MOST_POINTS, MOST_POINTS)
        parts.append((latent[outcomes.recorded], reward.round().long() + MOST_POINTS))
    return Steps(*(torch.cat(part) for part in zip(*parts, strict=True)))


def fit(head: nn.Linear, steps: Steps, epochs: int, rate: float) -> None:
    """Fit by Adam; the rate falls linearly to zero."""
    optimizer = torch.optim.Adam(head.parameters())
    updates = max(1, epochs * len(steps.points) // BATCH)
    for update in tqdm(range(updates), unit="step"):
        optimizer.param_groups[0]["lr"] = rate * (1 - update / updates)
        chosen = torch.randint(len(steps.points), (BATCH,))
        F.cross_entropy(head(steps.latent[chosen]), steps.points[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def judge(heads: PredictionHeads, steps: Steps) -> dict[str, float]:
    """Return the cross-entropy in nats, and the share of right classes: of all steps, of rewards that are 0 or not."""
    logits = heads.points(steps.latent)
    right, paid = (logits.argmax(-1) == steps.points).float(), steps.points != MOST_POINTS
    return {
        "loss": F.cross_entropy(logits, steps.points).item(),
        "right": right.mean().item(),
        "right_paid": right[paid].mean().item(),
        "right_unpaid": right[~paid].mean().item(),
        "n": len(right),
        "n_paid": int(paid.sum()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--config", type=Path, required=True, help="training configuration, for data, batch and seed")
    parser.add_argument("--steps", type=positive, required=True, help="global batches to fit on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")
    parser.add_argument("--epochs", type=positive, default=15, help="passes over their steps (default: %(default)s)")
    parser.add_argument("--rate", type=above_zero, default=1e-2, help="first learning rate (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")


def run(arguments: argparse.Namespace) -> None:
    """Load, fit, judge on the dev shards and write the checkpoint. Raises InputError."""
    if arguments.out.exists():
        raise InputError(f"--out: {arguments.out} exists already")
    program = TextProgram(load_config(arguments.config, arguments.overrides))
    model, tokenizer = load_checkpoint(arguments.model)
    heads = heads_of(model)
    batches = (batch for group, _ in islice(program.global_batches(LoaderState()), arguments.steps) for batch in group)
    train = read_steps(model, tqdm(batches, total=arguments.steps * program.micro_batches, unit="batch"))
    dev = read_steps(model, (batch.rows for batch in program.evaluation_batches()))
    report = {"before": judge(heads, dev)}
    torch.manual_seed(program.config.run.seed)
    for parameter in heads.points.parameters():
        nn.init.zeros_(parameter)
    fit(heads.points, train, arguments.epochs, arguments.rate)
    report |= {"after": judge(heads, dev), "train": judge(heads, train)}
    for name, row in report.items():
        print(f"{name}: loss {row['loss']:.4f}, right {row['right']:.4f}, of those paid {row['right_paid']:.4f}")
    learned = program.training_episodes
    export_model(model, tokenizer, arguments.out, learned and learned.joined(TrainingEpisodes.load(arguments.model)))
    write_json(arguments.out / "rewards.json", report)
