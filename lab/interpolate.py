"""Interpolate the weights of a checkpoint and of one that was trained further from it.

Fine-tuned weights forget part of what the first ones could do. On the line between the two, most of what was gained and
most of what was lost is there at once (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from loopwm.records.errors import InputError
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.training.program import export_model

EXAMPLE = "python -m lab interpolate loopwm/pretrained runs/further/model --share 0.5 --out runs/between"
GATE = "model.core.gate."


def interpolate(first: Path, second: Path, share: float, out: Path) -> None:
    """Write (1 - share) first + share second; an exit gate, which training drops, stays that of the first.

    Raises InputError for other weights or shapes.
    """
    model, tokenizer = load_checkpoint(first)
    end, _ = load_checkpoint(second)
    weights = model.state_dict()
    for name, weight in end.state_dict().items():
        if name not in weights or weights[name].shape != weight.shape:
            raise InputError(f"{first}: must have the weights of {second}, lacks {name} in this shape")
        weights[name] = torch.lerp(weights[name], weight, share)
    if missing := [name for name in weights.keys() - end.state_dict().keys() if not name.startswith(GATE)]:
        raise InputError(f"{second}: must have the weights of {first}, lacks {min(missing)}")
    model.load_state_dict(weights)
    model.config.tokens_per_byte = end.config.tokens_per_byte
    learned = TrainingEpisodes.load(first)
    export_model(model, tokenizer, out, learned and learned.joined(TrainingEpisodes.load(second)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="checkpoint that training began from")
    parser.add_argument("second", type=Path, help="checkpoint that it came to")
    parser.add_argument("--share", type=float, required=True, help="of the second, 0 to 1")
    parser.add_argument("--out", type=Path, required=True, help="new folder of the model")


def run(args: argparse.Namespace) -> None:
    if not 0 <= args.share <= 1:
        raise InputError(f"--share: must be 0 to 1, got {args.share}")
    if args.out.exists():
        raise InputError(f"--out: must not exist, got {args.out}")
    interpolate(args.first, args.second, args.share, args.out)
