"""What a model costs: parameters, and FLOPs of a token, counted from the configuration.

A multiplication and an addition are two operations. Only matrix products count, as in `torch.utils.flop_counter`:
norms, activations and softmax do not. Heads that run on state slots alone are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loopwm.text.configuration import LoopWMConfig
from loopwm.text.modeling import LoopWMForCausalLM


@dataclass(frozen=True)
class Parameters:
    total: int
    without_embeddings: int


def count_parameters(config: LoopWMConfig) -> Parameters:
    """The output embedding is tied to the input's and counts once."""
    with torch.device("meta"):
        model = LoopWMForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    return Parameters(total, total - model.model.embed_tokens.weight.numel())


def layer_flops(config: LoopWMConfig, keys: int) -> int:
    """One token through one layer: four projections, the MLP, and attention over `keys` keys."""
    dim = config.hidden_size
    return 2 * (4 * dim * dim + 2 * dim * config.intermediate_size) + 4 * keys * dim


def outer_flops(config: LoopWMConfig, keys: int) -> int:
    """Everything of a token but the loops: prelude, B, C, coda, copy attention, logits."""
    dim = config.hidden_size
    flops = (config.prelude_layers + config.coda_layers) * layer_flops(config, keys) + 2 * 2 * dim * dim
    if config.copy_attention:
        flops += 2 * 2 * dim * dim + 4 * keys * dim + 2 * dim
    return flops + 2 * dim * config.vocab_size


def loop_flops(config: LoopWMConfig, keys: int) -> int:
    """One token through one loop."""
    return config.block_layers * layer_flops(config, keys)


def forward_flops(config: LoopWMConfig, depth: float, keys: int) -> float:
    """One token through a pass of `depth` loops (a mean may be given), attending to `keys` keys in every layer."""
    return outer_flops(config, keys) + depth * loop_flops(config, keys)


def training_flops(config: LoopWMConfig, mean_depth: float, mu_bwd: int, keys: int) -> float:
    """Forward, and backward at twice the cost through all that carries gradients: of the loops the last `mu_bwd`.

    Taken at the mean depth: rows shallower than mu_bwd back-propagate a little less.
    """
    backward = outer_flops(config, keys) + min(mean_depth, mu_bwd) * loop_flops(config, keys)
    return forward_flops(config, mean_depth, keys) + 2 * backward
