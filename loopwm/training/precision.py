"""Which precision a training layer is faster in here: processors differ by a factor of ten in bfloat16 products."""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

Precision = Literal["no", "bf16"]

ROWS, LENGTH, WIDTH, HEADS = 4, 512, 256, 4
REPEATS = 3


def faster_precision() -> Precision:
    """`bf16` if a layer's products and attention, there and back, take less CPU time under autocast; else `no`."""
    return "bf16" if _seconds(autocast=True) < _seconds(autocast=False) else "no"


def _seconds(autocast: bool) -> float:
    """The least CPU time of a few passes, the first of which finds kernels and does not count."""
    up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    times = []
    for _ in range(1 + REPEATS):
        x = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = down(F.relu(up(x)).square())
            q = y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.float().sum().backward()
        times.append(time.process_time() - started)
    return min(times[1:])
