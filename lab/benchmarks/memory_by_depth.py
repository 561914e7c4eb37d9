"""Bytes saved for the backward pass, by loops T and by loops with gradients mu_bwd.

    python -m lab.benchmarks.memory_by_depth --preset tiny

Counts every tensor that autograd saves in the forward pass once (all live until the backward pass begins), except the
weights. Memory should follow mu_bwd and not T.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from loopwm.core.depth import DepthPlan
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM


def saved_bytes(model: LoopWMForCausalLM, tokens: Tensor, loops: int, mu_bwd: int) -> int:
    """Return the bytes of storages saved for the backward pass, except weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    storages: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            storages.append(tensor)  # an address must not be used twice while we count
        return tensor

    plan = DepthPlan((loops,) * len(tokens), mu_bwd, tuple(range(len(tokens))))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, labels=tokens, depth=plan)
    return sum(saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    preset: dict[str, Any] = {**PRESETS[arguments.preset], "max_loops": 32}
    model = LoopWMForCausalLM(LoopWMConfig(vocab_size=256, **preset))
    tokens = torch.randint(256, (arguments.batch, arguments.length))
    base = saved_bytes(model, tokens, 4, 2)
    print(
        f"{arguments.preset}, {arguments.batch} x {arguments.length} tokens; T = 4, mu_bwd = 2: {base / 2**20:.2f} MiB"
    )
    for loops in (2, 4, 8, 16, 32):
        print(f"T = {loops:2d}, mu_bwd = 2: {saved_bytes(model, tokens, loops, 2) / base:.3f}")
    for mu_bwd in (1, 2, 4, 8, 16):
        print(f"T = 16, mu_bwd = {mu_bwd:2d}: {saved_bytes(model, tokens, 16, mu_bwd) / base:.3f}")


if __name__ == "__main__":
    main()
