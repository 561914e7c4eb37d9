"""FLOPs of the model's matrix products, from its configuration: a multiplication and an addition are two."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from loopwm.text.model.configuration import LoopWMConfig

Amount = TypeVar("Amount", float, Tensor)

BACKWARD = 2
"""Products of a backward pass for each one of the forward pass: for inputs and for weights."""


def layer_flops(config: LoopWMConfig, keys: int) -> int:
    """Return the FLOPs of a token in a layer: four projections, the MLP, and attention over `keys` keys."""
    dim, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    projections = 2 * dim * heads + 2 * dim * _kv_width(config)
    return 2 * (projections + (3 if config.swiglu else 2) * dim * config.intermediate_size) + 4 * keys * heads


def outer_flops(config: LoopWMConfig, keys: int) -> int:
    """Return the FLOPs of a token outside the loops: prelude, B, C, coda, copy and reward attention, logits."""
    dim = config.hidden_size
    flops = (config.prelude_layers + config.coda_layers) * layer_flops(config, keys) + 2 * 2 * dim * dim
    if config.copy_attention:
        flops += 2 * (dim * dim + dim * _kv_width(config)) + 4 * keys * dim + 2 * dim
        if _kv_width(config) < dim:  # values are packed to the width of keys, and unpacked again
            flops += 2 * (dim * _kv_width(config) + dim * dim)
    if config.reward_attention:
        heads = config.num_attention_heads * config.head_dim
        flops += 2 * (2 * dim * heads + 4 * dim * _kv_width(config)) + 4 * keys * heads
    return flops + logit_flops(config)


def _kv_width(config: LoopWMConfig) -> int:
    return config.head_dim * (config.num_key_value_heads or config.num_attention_heads)


def logit_flops(config: LoopWMConfig) -> int:
    return 2 * config.hidden_size * config.vocab_size


def loop_flops(config: LoopWMConfig, keys: int) -> int:
    """Return the FLOPs of a token in one loop."""
    return config.block_layers * layer_flops(config, keys)


def forward_flops(config: LoopWMConfig, depth: float, keys: int) -> float:
    """Return the FLOPs of a token in a pass of `depth` loops (a mean may be given), with `keys` keys in every layer."""
    return outer_flops(config, keys) + depth * loop_flops(config, keys)


def training_flops(config: LoopWMConfig, mean_depth: float, mu_bwd: int, keys: int) -> float:
    """Return the FLOPs of a token forward and backward, through the last `mu_bwd` loops.

    Taken at the mean depth: rows shallower than mu_bwd back-propagate a little less.
    """
    backward = outer_flops(config, keys) + min(mean_depth, mu_bwd) * loop_flops(config, keys)
    return forward_flops(config, mean_depth, keys) + BACKWARD * backward


def row_flops(
    config: LoopWMConfig, tokens: Amount, keys: Amount, targets: Amount, loops: Amount, backward_loops: Amount
) -> Amount:
    """Return the FLOPs of rows in training, forward and backward. Padding and the heads of the loss do not count.

    Args:
        config: of the model.
        tokens: of each row.
        keys: that the tokens of a row attend to, summed over them.
        targets: tokens of a row with logits.
        loops: of each row.
        backward_loops: those of them that carry gradients.
    """
    outer, loop = outer_flops(config, 0) - logit_flops(config), loop_flops(config, 0)
    outer_key, loop_key = outer_flops(config, 1) - outer_flops(config, 0), loop_flops(config, 1) - loop
    once = outer * tokens + outer_key * keys + logit_flops(config) * targets  # outside the loops
    return (1 + BACKWARD) * once + (loops + BACKWARD * backward_loops) * (loop * tokens + loop_key * keys)
