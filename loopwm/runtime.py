"""Process-wide settings that depend on processor and C library: memory, matrix products, precision.

Memory. By default glibc maps and unmaps large tensors, whose pages are then cleared again at every join of a batch and
in every layer of a training step; and freed worlds stay in the pools of their threads. With another C library nothing
is done.

Products. Torch gives float32 products to MKL, which on AMD's processors takes twice the time of oneDNN. Torch uses
oneDNN only if bfloat16 may be used inside; without matrix units (AMX) oneDNN still computes in float32.

Precision. Processors differ by a factor of ten in bfloat16 products, so a run measures the faster one, and the rate of
large products, to log the share of it that training reaches.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from loopwm.records.errors import InputError

ARENA_MAX, MMAP_MAX, MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD = -8, -4, -3, -2, -1
"""Parameters of glibc's mallopt: pools, mappings, bytes from which an allocation is mapped, bytes requested beyond the
need, free bytes at the end that are returned.
"""


def keep_for_reuse() -> None:
    """Set the allocator for a service: small blocks stay, large ones are returned. Call before threads start."""
    _set({ARENA_MAX: 1, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: (1 << 31) - 1})


def keep_everything() -> None:
    """Set the allocator for training, where every step allocates the same as the one before; keep compiled products.

    Rows have many lengths, and oneDNN would keep those of its last 1,024 shapes only. Call before the first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    _set({MMAP_MAX: 0, TOP_PAD: 1 << 28, TRIM_THRESHOLD: (1 << 31) - 1})


def _set(parameters: Mapping[int, int]) -> None:
    if (libc := _glibc()) is not None:
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


def settle() -> None:
    """Freeze all live objects out of garbage collection. Call once everything is loaded.

    Otherwise every full collection scans them and stops all threads, for 0.3 s with torch and transformers.
    """
    gc.collect()
    gc.freeze()


def release_memory() -> None:
    """Return free memory to the system; takes about 50 ms a gigabyte."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


FEW = 16
"""Vectors below which finding oneDNN's kernel takes longer than it saves."""


LONG = 768
"""Queries a row from which torch cuts attention into blocks large enough for oneDNN."""


def quick_products(vectors: int = FEW) -> AbstractContextManager[None]:
    """Use oneDNN for float32 products with at least `vectors` vectors. Process-wide; restored on exit."""
    return _precision("bf16") if vectors >= FEW and _onednn_is_quicker() else nullcontext()


def attention_products(queries: int) -> AbstractContextManager[None]:
    """Restore MKL within `quick_products` for attention of few queries a row.

    Finding oneDNN's kernel for every small block takes several times as long as the products
    (lab/benchmarks/products.py).
    """
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


def compiler_found() -> bool:
    """Return True if torch finds a C++ compiler, which it needs to compile for CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # two seconds, for training alone

    try:
        get_cpp_compiler()
    except RuntimeError:  # torch's InvalidCxxCompiler
        return False
    return True


Precision = Literal["no", "bf16"]

ROWS, LENGTH, WIDTH, HEADS = 4, 512, 256, 4
REPEATS = 3


def faster_precision() -> Precision:
    """Return `bf16` if a layer takes less CPU time under autocast, forward and backward, else `no`."""
    return "bf16" if _seconds(autocast=True) < _seconds(autocast=False) else "no"


def use_device(name: str, key: str = "--device") -> torch.device:
    """Return the device to compute on, and allow TF32 for float32 products on a GPU.

    TF32 keeps 10 bits of the mantissa, more than the 7 of the bfloat16 that checkpoints are published in.

    key: the option or configuration key that named the device, for the error.

    Raises InputError for `cuda` where torch finds no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise InputError(f"{key}: cuda needs a GPU and a CUDA build of torch, and torch finds none; use cpu or auto")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    # cuDNN plans its attention for every new shape, which takes longer than the attention itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices in rate measurements: large enough for the best rate."""


def product_rate(precision: str, device: torch.device) -> float:
    """Return the FLOPs a second of large matrix products with the settings, threads and precision in use.

    precision: of the run, such as `bf16`; all but `bf16` and `fp16` multiply in float32.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side = SIDE.get(device.type, 1024)
    x = torch.ones(side, side, dtype=dtype, device=device)
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for the product
        times.append(time.perf_counter() - started)
    return 2 * side**3 / min(times[1:])


def _seconds(autocast: bool) -> float:
    """Return the least CPU time of a few passes. The first finds kernels and does not count."""
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
