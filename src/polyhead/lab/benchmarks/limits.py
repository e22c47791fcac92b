"""What the machine does at best: one instruction in registers and plain reads, or torch's products.

On a CPU with native code the limits are the hardware's (``native.rates``): products and sums whose
operands stay in registers, and reads of as many bytes by vectors. Elsewhere, as on a GPU, they are
a square matrix product and a sum.
"""

from __future__ import annotations

import functools
import time

import torch

from polyhead.lab.benchmarks.case import Call, Limit
from polyhead.native import rates

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_LEAST, _MOST = 1e8, 4e9
"""Operations in registers of one measurement: half a millisecond to some tens."""


def matrix_rate(dtype: torch.dtype, operations: float) -> Limit:
    """About as many operations by the fastest instruction that multiplies ``dtype``, in registers.

    Without native code, and on a GPU, a square matrix product: between 1,024 and 2,048 rows, in
    float32 where a processor without instructions for ``dtype`` multiplies faster so; on a GPU
    8,192 rows, since smaller ones do not fill it.
    """
    if _on("cpu") and (found := rates.instructions(dtype)):
        fastest = max(found, key=_rate_of)
        size = min(_MOST, max(_LEAST, operations))
        share = operations / rates.compute(fastest, size)
        return Limit("operations", fastest, functools.partial(rates.compute, fastest, size), share)
    n = min(2048, max(1024, 256 * round((operations / 2) ** (1 / 3) / 256)))
    name = "matrix product"
    if _on("cuda"):
        n = 8192
    elif _seconds(torch.float32) < _seconds(dtype):
        dtype, name = torch.float32, "matrix product in float32"
    a, b = torch.randn(2, n, n).to(dtype)
    return Limit("operations", f"{n}³ {name}", lambda: a @ b, operations / (2 * n**3))


def read_rate(size: float) -> Limit:
    """One pass over as many bytes: vectors that are read, or a sum of float32.

    On a GPU over 1 GiB or more.
    """
    if _on("cpu") and (read := rates.reader(int(size))) is not None:
        return Limit("bytes", f"reading {int(size):,} bytes", read, 1.0)
    memory = torch.ones(int(max(size, 1 << 30) if _on("cuda") else size) // 4)
    return Limit("bytes", f"sum over {memory.nbytes:,} bytes", memory.sum, size / memory.nbytes)


def hardware() -> dict[str, float]:
    """What all threads of a CPU do a second: operations of each instruction, bytes of plain reads.

    The reads are of 1, 16 and 256 MiB, which second and last caches and memory hold. Empty without
    native code.
    """
    names = dict.fromkeys(name for dtype in _DTYPES for name in rates.instructions(dtype))
    found = {name: _rate_of(name) for name in names}
    for size in (1, 16, 256):
        if (read := rates.reader(size << 20)) is not None:
            found[f"reads of {size} MiB"] = (size << 20) / min(_timed(read) for _ in range(8))
    return found


@functools.cache
def _rate_of(instruction: str) -> float:
    """Operations a second at best."""
    run = functools.partial(rates.compute, instruction, _LEAST)
    return run() / min(_timed(run) for _ in range(8))


@functools.cache
def _seconds(dtype: torch.dtype) -> float:
    """What a product of 256 rows takes at best."""
    a, b = torch.randn(2, 256, 256).to(dtype)
    return min(_timed(lambda: a @ b) for _ in range(4))


def _timed(run: Call) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _on(device: str) -> bool:
    return torch.get_default_device().type == device
