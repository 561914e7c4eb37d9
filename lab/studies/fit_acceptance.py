"""Fit the acceptance head of a finished model, which stays frozen.

The head reads h_k after an action; whether it was carried out is the target. The actions are the candidates of states
that `python -m lab acceptance` collects, half of them refused, and the supervised steps of training rows: candidates
alone give a head that refuses too much, rows one that misses half of the candidates. It is fitted by Adam, and judged
before and after on other states and on the dev shards.

Shape suffixes: N candidates, D width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from eval.scores.rows import detection
from lab.studies.acceptance import State, context_of, read_states
from loopwm.records.command import above_zero, positive
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import AcceptanceHead, PredictionHeads
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import Outcomes, run_rows
from loopwm.text.training.program import TextProgram, export_model
from loopwm.text.world import WorldModel

EXAMPLE = (
    "python -m lab fit-acceptance --model loopwm/pretrained --train lab/data/acceptance_train_scienceworld.jsonl.xz "
    "--dev lab/data/acceptance_dev_scienceworld.jsonl.xz --config configs/reference.yaml --steps 100 --out runs/fit"
)

BATCH = 512


@dataclass(frozen=True)
class Candidates:
    """Actions that were tried. latent: (N, D), pooled over slots; accepted: (N,), by the simulator."""

    latent: Tensor
    accepted: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        return cls(torch.cat([part.latent for part in parts]), torch.cat([part.accepted for part in parts]))


def heads_of(model: LoopWMForCausalLM) -> PredictionHeads:
    """Raise InputError if there are none."""
    if model.model.heads is None:
        raise InputError("--model: has no prediction heads")
    return model.model.heads


@torch.inference_mode()
def read_candidates(model: WorldModel, states: Iterable[State]) -> Candidates:
    """Imagine every candidate of every state at the model's default depth; nothing is decoded."""
    heads = heads_of(model.model)
    latents, accepted = [], []
    for state in states:
        world = model.encode([context_of(state)])
        actions = [action for action, _ in state["candidates"]]
        latents += [heads.read(after.latent)[0] for after in model.advance_each([world] * len(actions), actions)]
        accepted += [truth for _, truth in state["candidates"]]
    return Candidates(torch.cat(latents), torch.tensor(accepted))


@torch.inference_mode()
def read_rows(model: LoopWMForCausalLM, batches: Iterable[TreeBatch]) -> Candidates:
    """Run the model over training rows at its default depth; return their supervised steps."""
    parts = []
    for batch in batches:
        groups = (batch.steps, batch.trunk_steps)
        out = run_rows(model.model, batch, model.config.default_depth)
        outcomes = Outcomes.of(groups)
        latent = torch.cat([heads_of(model).read(steps.at_slots(out.latent))[0] for steps in groups])
        parts.append(Candidates(latent[outcomes.supervised], outcomes.accepted[outcomes.supervised]))
    return Candidates.joined(parts)


def fit(head: AcceptanceHead, candidates: Candidates, epochs: int, rate: float) -> None:
    """Fit by Adam with decoupled weight decay; the rate falls linearly to zero."""
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=1.0)
    updates = max(1, epochs * len(candidates.accepted) // BATCH)
    for update in tqdm(range(updates), unit="step"):
        optimizer.param_groups[0]["lr"] = rate * (1 - update / updates)
        chosen = torch.randint(len(candidates.accepted), (BATCH,))
        logits = head(candidates.latent[chosen])[:, 0]
        F.binary_cross_entropy_with_logits(logits, candidates.accepted[chosen].float()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def judge(head: AcceptanceHead, candidates: Candidates) -> dict[str, Any]:
    """Return precision, recall and F1 of what the head accepts and of what it refuses."""
    said = (head(candidates.latent)[:, 0] >= 0).tolist()
    pairs = list(zip(said, candidates.accepted.tolist(), strict=True))
    return {
        "accepted": detection(pairs),
        "refused": detection([(not one, not truth) for one, truth in pairs]),
        "n": len(pairs),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="files of states to fit on")
    parser.add_argument("--dev", type=Path, nargs="+", required=True, help="files of states to judge on, each alone")
    parser.add_argument("--config", type=Path, required=True, help="training configuration, for data, batch and seed")
    parser.add_argument("--steps", type=positive, required=True, help="global batches to fit on, too")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")
    parser.add_argument("--epochs", type=positive, default=100, help="passes over the candidates (default: 100)")
    parser.add_argument("--rate", type=above_zero, default=3e-3, help="first learning rate (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")


def run(arguments: argparse.Namespace) -> None:
    """Load, fit, judge and write the checkpoint. Raises InputError."""
    if arguments.out.exists():
        raise InputError(f"--out: {arguments.out} exists already")
    # Results are by file name, beside those of training rows.
    names = [file.name for file in arguments.dev]
    if len({*names, "rows"}) <= len(names):
        raise InputError(f"--dev: file names must differ, from 'rows' too, got {', '.join(names)}")
    program = TextProgram(load_config(arguments.config, arguments.overrides))
    model, tokenizer = load_checkpoint(arguments.model)
    heads = heads_of(model)
    world_model = WorldModel(model, tokenizer)
    batches = (batch for group, _ in islice(program.global_batches(LoaderState()), arguments.steps) for batch in group)
    rows = read_rows(model, tqdm(batches, total=arguments.steps * program.micro_batches, unit="batch"))
    states = [read_candidates(world_model, tqdm(read_states(file), unit="state")) for file in arguments.train]
    train = Candidates.joined([*states, rows])
    dev = {file.name: read_candidates(world_model, tqdm(read_states(file), unit="state")) for file in arguments.dev}
    dev["rows"] = read_rows(model, (batch.rows for batch in program.evaluation_batches()))
    report: dict[str, Any] = {"before": {name: judge(heads.acceptance, tried) for name, tried in dev.items()}}
    torch.manual_seed(program.config.run.seed)
    heads.acceptance.reset_parameters()
    fit(heads.acceptance, train, arguments.epochs, arguments.rate)
    report |= {"after": {name: judge(heads.acceptance, tried) for name, tried in dev.items()}}
    report |= {"train": judge(heads.acceptance, train)}
    for name, row in report["after"].items():
        accepted, refused = (row[kind].get("f1", math.nan) for kind in ("accepted", "refused"))
        print(f"{name}: F1 of what is accepted {accepted:.3f}, of what is refused {refused:.3f}")
    learned = program.training_episodes
    export_model(model, tokenizer, arguments.out, learned and learned.joined(TrainingEpisodes.load(arguments.model)))
    write_json(arguments.out / "acceptance.json", report)
