"""Time of choosing a frame's tokens, by decoder, as a ratio to sampling and to the core's own work on that frame.

    python benchmarks/pixel_decoders.py

The core is stood for by one matrix product of the size of its dense layers: 12 D^2 multiplications a layer and slot,
each layer as often as it runs. Rounds take turns, so that a busy machine slows all alike; medians are shown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from loopwm.pixel.twisted.decoding import Argmax, Copy, Decoder, ExactAssignment, Sample, Sinkhorn, Sticky, Transport

CORE = "the core's products"


def decoders(grid: tuple[int, int]) -> dict[str, Decoder]:
    return {
        "sample": Sample(),
        "argmax": Argmax(),
        "copy": Copy(),
        "sticky 0.3": Sticky(0.3),
        "transport (0.6, 0.3) exact": Transport(grid, 0.6, 0.3, ExactAssignment()),
        "transport (0.05, 0.6) exact": Transport(grid, 0.05, 0.6, ExactAssignment()),
        "transport (0.05, 0.6) Sinkhorn 1e-5, 10": Transport(grid, 0.05, 0.6, Sinkhorn()),
        "transport (0.05, 0.6) Sinkhorn 0.03, 100": Transport(grid, 0.05, 0.6, Sinkhorn(0.03, 100)),
    }


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--grid", type=int, nargs=2, default=(9, 9), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--codes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=128, help="of the core")
    parser.add_argument("--layers", type=int, default=3, help="of the core, counted as often as they run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    grid, count = tuple(args.grid), math.prod(args.grid)
    generator = torch.Generator(args.device).manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "device": args.device}
    previous = torch.randint(args.codes, (args.batch, count), **draw)
    logits = 3 * torch.randn(args.batch, count, args.codes, **draw)
    for tokens in (previous, previous.roll(1, dims=1)):
        logits.scatter_add_(-1, tokens[..., None], 12 * torch.rand(args.batch, count, 1, **draw))
    p = logits.softmax(-1)
    slots = torch.randn(args.batch * (count + 1), args.width, **draw)
    weight = torch.randn(args.width, 12 * args.width * args.layers, **draw)
    work: dict[str, Callable[[], Any]] = {
        name: lambda decode=decode: decode(p, previous, generator) for name, decode in decoders(grid).items()
    }
    work[CORE] = lambda: slots @ weight
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(args.rounds + 1):
        for name, run in work.items():
            spent = seconds(run, args.device)
            if number:  # the first round is for warming up
                times[name].append(spent)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    print(f"{args.batch} frames of {count} tokens, {args.codes} codes, {args.device}")
    for name, spent in median.items():
        ratios = f"{spent / median['sample']:6.2f} of sampling, {spent / median[CORE]:6.3f} of the core"
        print(f"{name:42s} {1000 * spent:8.2f} ms  {ratios}")


if __name__ == "__main__":
    main()
