"""Tabulate what each preset costs in training and serving, from its configuration: no weights are allocated.

GPU hours assume the given share of the given peak, so they are estimates until a run logs its own `roof_share`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch

from eval.scores.tables import table
from loopwm.records.command import above_zero
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.flops import forward_flops, training_flops
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.trainer.optimizer import split_parameters

EXAMPLE = "python -m lab scaling --peak 989e12 --share 0.4 --price 2.5"

FLOAT32, BFLOAT16 = 4, 2
BILLION = 10**9
TOKENS = (10 * BILLION, 100 * BILLION, 1000 * BILLION)


@dataclass(frozen=True)
class Costs:
    """Cost of a preset.

    parameters: of the model, tied embeddings once. training_bytes: of weights, gradients, optimiser state and averaged
    weights, all in float32, without activations. kv_bytes: of keys and values a token in bfloat16 at the default depth.
    training_flops, serving_flops: a token.
    """

    parameters: int
    training_bytes: int
    kv_bytes: int
    training_flops: float
    serving_flops: float

    def gpu_hours(self, tokens: int, rate: float) -> float:
        """Return the hours to train on `tokens` at `rate` FLOPs a second."""
        return tokens * self.training_flops / rate / 3600


def costs(config: LoopWMConfig, keys: int) -> Costs:
    """Return the costs of a model whose tokens attend to `keys` keys in every layer."""
    with torch.device("meta"):
        model = LoopWMForCausalLM(config)
    depth = config.default_depth
    return Costs(
        parameters=model.num_parameters(),
        training_bytes=training_bytes(model, averaged=True),
        kv_bytes=kv_bytes(config, depth),
        training_flops=training_flops(config, config.mu_rec, math.ceil(config.mu_rec / 2), keys),
        serving_flops=forward_flops(config, depth, keys),
    )


def training_bytes(model: LoopWMForCausalLM, averaged: bool) -> int:
    """Return the bytes of weights, gradients, Muon's momentum or Adam's two moments, and averaged weights."""
    matrices, rest = split_parameters(model)
    muon, adam = (sum(parameter.numel() for parameter in group) for group in (matrices, rest))
    copies = 3 if averaged else 2
    return FLOAT32 * ((copies + 1) * muon + (copies + 2) * adam)


def kv_bytes(config: LoopWMConfig, loops: int, width: int = BFLOAT16) -> int:
    """Return the bytes of a token's keys and values: all attention outside the block, and `loops` times the block."""
    layers = config.prelude_layers + config.coda_layers + loops * config.block_layers
    layers += config.copy_attention + config.reward_attention
    heads = config.num_key_value_heads or config.num_attention_heads
    return layers * 2 * heads * config.head_dim * width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=1024, help="keys that a token attends to (default: 1024)")
    parser.add_argument(
        "--peak", type=above_zero, default=989e12, help="FLOPs a second of a GPU (default: H100, bfloat16)"
    )
    parser.add_argument(
        "--share", type=above_zero, default=0.4, help="of the peak that training reaches (default: 0.4)"
    )
    parser.add_argument("--price", type=float, default=2.5, help="of a GPU hour (default: 2.5)")


def run(args: argparse.Namespace) -> None:
    vocabulary = len(load_tokenizer())
    rows: list[list[Any]] = []
    for name, preset in PRESETS.items():
        shape: dict[str, Any] = {**preset, "vocab_size": vocabulary}
        of = costs(LoopWMConfig(**shape), args.keys)
        hours = [of.gpu_hours(tokens, args.peak * args.share) for tokens in TOKENS]
        rows.append(
            [
                name,
                f"{of.parameters / 1e6:.1f}M",
                f"{of.training_bytes / 2**30:.2f}",
                f"{of.kv_bytes / 2**10:.1f}",
                f"{of.training_flops / 1e9:.3f}",
                f"{of.serving_flops / 1e9:.3f}",
                *(f"{h:,.0f} ({h * args.price:,.0f})" for h in hours),
            ]
        )
    amounts = [f"{tokens // BILLION}B tokens" for tokens in TOKENS]
    print(table(["preset", "parameters", "GiB", "KiB", "GFLOPs trained", "GFLOPs served", *amounts], rows))
