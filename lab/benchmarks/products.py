"""Matrix products in float32: torch's choice of library against `quick_products`.

Times the shipped model's sizes, and attention inside `quick_products` without the exception that `attention_products`
makes.

    python -m lab.benchmarks.products
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.runtime import attention_products, quick_products

SHAPES = ((256, 256), (256, 1024), (1024, 256), (256, 2048))
"""Inputs and outputs of the model's linear layers."""

ATTENTION = ((1, 800), (8, 800), (300, 300), (1000, 1000))
"""Queries and keys of a row of 4 heads of width 64."""

REPEATS = 300


def microseconds(work: Callable[[], Tensor]) -> float:
    """Return the median of many calls after a warm-up."""
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
    print("\n| queries | keys | torch's choice, us | quick_products, us | attention_products within them, us |")
    print("| --- | --- | --- | --- | --- |")
    for queries, keys in ATTENTION:
        q, k, v = (torch.randn(1, 4, length, 64) for length in (queries, keys, keys))
        plain = microseconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
        with quick_products():
            quick = microseconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
            with attention_products(queries):
                chosen = microseconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
        print(f"| {queries} | {keys} | {plain:.0f} | {quick:.0f} | {chosen:.0f} |")


if __name__ == "__main__":
    main()
