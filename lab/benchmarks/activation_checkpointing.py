"""Activations that a training pass stores, and its time, with layers recomputed in the backward pass and without.

python -m lab.benchmarks.activation_checkpointing --preset small
"""

from __future__ import annotations

import argparse
import time

import torch

from loopwm.core.block import checkpoint_blocks
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM

VOCABULARY = 4096
ROWS, LENGTH = 2, 512


def measure(preset: str, checkpointed: bool) -> tuple[float, float]:
    """Return MiB stored for the backward pass, parameters left out, and seconds of a forward and backward pass."""
    torch.manual_seed(0)
    model = LoopWMForCausalLM(LoopWMConfig(vocab_size=VOCABULARY, **PRESETS[preset]))  # type: ignore[arg-type]
    if checkpointed:
        checkpoint_blocks(model)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    stored: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        stored[saved.data_ptr()] = saved.nbytes  # a tensor that several operations save is stored once
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        hidden = model.model(tokens).last_hidden_state
    hidden.square().mean().backward()
    started = time.process_time()
    model.model(tokens).last_hidden_state.square().mean().backward()
    seconds = time.process_time() - started
    return sum(size for place, size in stored.items() if place not in parameters) / 2**20, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    preset = parser.parse_args().preset
    plain, recomputed = measure(preset, False), measure(preset, True)
    for name, (mib, seconds) in (("stored", plain), ("recomputed", recomputed)):
        print(f"{preset}, {name}: {mib:.0f} MiB, {seconds:.2f} s for {ROWS * LENGTH} tokens")
    print(f"ratio: {recomputed[0] / plain[0]:.2f} of the memory, {recomputed[1] / plain[1]:.2f} of the time")


if __name__ == "__main__":
    main()
