"""Time of a training step through a memory, by module, as a ratio to a GRU's.

    python -m lab.benchmarks.memory_modules

A step: forward and backward of 64 rows of 19 vectors of width 64, with a loss on the last; depths are sampled as in
training. Rounds alternate, so that other load slows all alike; prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from lab.pixels.memories import MemoryModule, ModuleConfig
from loopwm.core.depth import DepthPlan

MODULES = {
    "gru": ModuleConfig(kind="gru", dim=64, heads=4, mlp_dim=128),
    "lstm": ModuleConfig(kind="lstm", dim=64, heads=4, mlp_dim=128),
    "mamba": ModuleConfig(kind="mamba", dim=64, heads=4, mlp_dim=128),
    "recurrence, 2 loops": ModuleConfig(
        kind="recurrence", dim=64, heads=4, mlp_dim=128, mu_rec=2.0, default_depth=2, max_loops=2
    ),
    "recurrence, 3 loops and a coda": ModuleConfig(
        kind="recurrence", dim=64, heads=4, mlp_dim=128, coda_layers=1, mu_rec=3.0, default_depth=3, max_loops=8
    ),
    "attention, 2 loops": ModuleConfig(
        kind="attention", dim=64, heads=4, mlp_dim=128, mu_rec=2.0, default_depth=2, max_loops=2
    ),
    "gru of the last four": ModuleConfig(kind="gru", dim=64, heads=4, mlp_dim=128, frames=4),
}


def seconds(memory: MemoryModule, x: torch.Tensor, step: int) -> float:
    config = memory.config
    start = time.perf_counter()
    plan = DepthPlan.sample(0, step, range(len(x)), config.mu_rec, config.max_loops)
    memory(x, plan)[:, -1].square().mean().backward()
    memory.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    x = torch.randn(64, 19, 64)
    memories = {name: MemoryModule(config) for name, config in MODULES.items()}
    taken: dict[str, list[float]] = {name: [] for name in memories}
    for step in range(rounds + 1):
        for name, memory in memories.items():
            spent = seconds(memory, x, step)
            if step:  # the first pays for what is set up once
                taken[name].append(spent)
    base = statistics.median(taken["gru"])
    for name, times in taken.items():
        print(f"{name:32} {1000 * statistics.median(times):8.1f} ms {statistics.median(times) / base:6.1f} x GRU")


if __name__ == "__main__":
    main()
