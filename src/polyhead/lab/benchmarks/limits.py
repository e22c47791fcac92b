"""What the machine can do at best, measured with torch's plainest operations."""

from __future__ import annotations

import functools
import time

import torch

from polyhead.lab.benchmarks.case import Limit


def matrix_rate(dtype: torch.dtype, operations: float) -> Limit:
    """A square matrix product of about as many operations, between 1,024 and 2,048 rows.

    On a GPU 8,192 rows: smaller ones do not fill it. In float32, where a processor without
    instructions for ``dtype`` multiplies faster so.
    """
    n = min(2048, max(1024, 256 * round((operations / 2) ** (1 / 3) / 256)))
    name = "matrix product"
    if _on_gpu():
        n = 8192
    elif _seconds(torch.float32) < _seconds(dtype):
        dtype, name = torch.float32, "matrix product in float32"
    a, b = torch.randn(2, n, n).to(dtype)
    return Limit("operations", f"{n}³ {name}", lambda: a @ b, operations / (2 * n**3))


def read_rate(size: float) -> Limit:
    """One pass over as many bytes, on a GPU over 1 GiB or more: a sum of float32."""
    memory = torch.ones(int(max(size, 1 << 30) if _on_gpu() else size) // 4)
    return Limit("bytes", f"sum over {memory.nbytes:,} bytes", memory.sum, size / memory.nbytes)


@functools.cache
def _seconds(dtype: torch.dtype) -> float:
    """What a product of 256 rows takes at best."""
    a, b = torch.randn(2, 256, 256).to(dtype)
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"
