"""Matrix products in float32: torch's choice of library against `quick_products`, at the shipped model's sizes.

python benchmarks/products.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core import quick_products

SHAPES = ((256, 256), (256, 1024), (1024, 256), (256, 2048))
"""Inputs and outputs of the model's linear layers."""

REPEATS = 300


def microseconds(work: Callable[[], Tensor]) -> float:
    """The median of many calls after some for warming up."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times[REPEATS // 10 :])[REPEATS * 9 // 20]


@torch.inference_mode()
def main() -> None:
    print("| inputs | outputs | vectors | torch's choice, us | quick_products, us | ratio | largest error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for inputs, outputs in SHAPES:
        for vectors in (1, 16, 32, 160, 512, 2048):
            x, w = torch.randn(vectors, inputs), torch.randn(outputs, inputs)
            plain = microseconds(lambda x=x, w=w: F.linear(x, w))
            with quick_products(vectors):
                quick = microseconds(lambda x=x, w=w: F.linear(x, w))
                error = (F.linear(x, w).double() - x.double() @ w.double().T).abs().max().item()
            sizes = f"{inputs} | {outputs} | {vectors}"
            print(f"| {sizes} | {plain:.0f} | {quick:.0f} | {plain / quick:.2f} | {error:.1e} |")


if __name__ == "__main__":
    main()
