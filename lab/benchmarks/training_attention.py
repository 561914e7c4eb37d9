"""Forward and backward time of `training_attention` against torch's fused kernel, on the same tokens.

    OMP_NUM_THREADS=1 python -m lab.benchmarks.training_attention

CPU milliseconds of 4,096 tokens, 4 heads of 64, one of keys and values; the minimum of alternating repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from loopwm.core.block import causal_attention
from loopwm.core.training_attention import training_attention

TOKENS, HEADS, WIDTH = 4096, 4, 64
LENGTHS = (128, 256, 512, 1024, 2048)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(0, q, k, v, None)


def milliseconds(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> float:
    started = time.process_time()
    attention(q, k, v).sum().backward()
    return 1000 * (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| type | tokens a row | fused, ms | training_attention, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            shapes = [(TOKENS // length, heads, length, WIDTH) for heads in (HEADS, 1, 1)]
            rows = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
            times = [[milliseconds(a, *rows) for a in (fused, training_attention)] for _ in range(1 + repeats)]
            before, after = (min(column) for column in zip(*times[1:], strict=True))
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {length} | {before:.1f} | {after:.1f} | {before / after:.2f} |")


if __name__ == "__main__":
    main()
