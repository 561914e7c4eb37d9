"""Matrix products in float32, by the library that is the faster one on this processor.

Torch leaves them to MKL, which on AMD's processors takes twice the time that oneDNN does. Torch asks oneDNN only where
bfloat16 may be used inside; without matrix units (AMX) oneDNN computes in float32 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch

FEW = 16
"""Vectors below which finding oneDNN's kernel takes longer than it saves."""


LONG = 768
"""Queries a row from which torch cuts attention into blocks that are large enough for oneDNN."""


def quick_products(vectors: int = FEW) -> AbstractContextManager[None]:
    """For matrices times this many vectors at a time, by default enough of them. A setting of the whole
    process, as it was before afterwards."""
    return _precision("bf16") if vectors >= FEW and _onednn_is_quicker() else nullcontext()


def attention_products(queries: int) -> AbstractContextManager[None]:
    """Within `quick_products`, for attention of this many queries a row: finding oneDNN's kernel for every small block
    of it takes several times as long as the products (benchmarks/products.py)."""
    return _precision("none") if queries < LONG and _onednn_is_quicker() else nullcontext()


@contextmanager
def _precision(name: str) -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a property of a module
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _onednn_is_quicker() -> bool:
    processor = Path("/proc/cpuinfo")
    if not processor.exists():
        return False
    text = processor.read_text()
    return "AuthenticAMD" in text and "amx" not in text
