"""What depends on the processor and the C library: memory, matrix products, precision.

Memory. Left to itself, glibc maps and unmaps large tensors, whose pages then are cleared anew at every join of a batch
and in every layer of a training step; and what worlds held stays with its threads' pools for ever. Nothing is done
where the C library is another one.

Products. Torch leaves those in float32 to MKL, which on AMD's processors takes twice the time that oneDNN does. Torch
asks oneDNN only where bfloat16 may be used inside; without matrix units (AMX) oneDNN computes in float32 all the same.

Precision. Processors differ by a factor of ten in bfloat16 products, so a run measures which one is faster here, and
at which rate large products run, to log the share of it that training reaches.
"""

from __future__ import annotations

import ctypes
import gc
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
"""Parameters of glibc's mallopt: pools, mappings, bytes that are mapped on their own, bytes that are asked for beyond
what is needed, free bytes at the end that are returned."""


def keep_for_reuse() -> None:
    """Sets the allocator for a service: small pieces stay, large ones go. To be called before there are threads."""
    _set({ARENA_MAX: 1, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: (1 << 31) - 1})


def keep_everything() -> None:
    """Sets the allocator for a training run, every step of which needs what the one before needed."""
    _set({MMAP_MAX: 0, TOP_PAD: 1 << 28, TRIM_THRESHOLD: (1 << 31) - 1})


def _set(parameters: Mapping[int, int]) -> None:
    if (libc := _glibc()) is not None:
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


def settle() -> None:
    """To be called once all is loaded. What there is now stays: else every full garbage collection looks through it
    and everybody waits, 0.3 s with torch and transformers."""
    gc.collect()
    gc.freeze()


def release_memory() -> None:
    """Takes some 50 ms a gigabyte."""
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
"""Queries a row from which torch cuts attention into blocks that are large enough for oneDNN."""


def quick_products(vectors: int = FEW) -> AbstractContextManager[None]:
    """For matrices times this many vectors at a time, by default enough of them. A setting of the whole
    process, as it was before afterwards."""
    return _precision("bf16") if vectors >= FEW and _onednn_is_quicker() else nullcontext()


def attention_products(queries: int) -> AbstractContextManager[None]:
    """Within `quick_products`, for attention of this many queries a row: finding oneDNN's kernel for every small block
    of it takes several times as long as the products (lab/benchmarks/products.py)."""
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
    """Whether torch finds a C++ compiler, which it needs to compile for a processor."""
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


DEVICES = ("auto", "cpu", "cuda")
"""Values of `--device`; `auto` takes a GPU if torch finds one."""


def use_device(name: str, key: str = "--device") -> torch.device:
    """Return the device to compute on, and allow TF32 for float32 products on a GPU.

    TF32 keeps 10 bits of the mantissa, more than the 7 of the bfloat16 that checkpoints are published in.

    Args:
        name: one of `DEVICES`.
        key: the option or configuration key that named it, for the error.

    Raises:
        InputError: for `cuda` where torch finds no GPU.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError(f"{key}: cuda needs a GPU and a CUDA build of torch, and torch finds none; use cpu or auto")
    if name == "cpu" or not found:
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")


SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices that a processor's rate is measured with: large enough for its best rate."""


def product_rate(precision: str, device: torch.device) -> float:
    """Return the FLOPs a second of large matrix products with the settings, threads and precision in use.

    Args:
        precision: of the run, such as `bf16`; others than `bf16` and `fp16` multiply in float32.
        device: that computes.
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
