"""How the recurrence is computed: a file per kernel; kernels do not import each other.

``KERNELS`` is in the order of preference. ``chunked`` can do everything on a CPU and on CUDA.
"""

from polyhead.kernels.recurrence.base import RecurrenceKernel
from polyhead.kernels.recurrence.chunked import ChunkedKernel
from polyhead.kernels.recurrence.native import NativeKernel
from polyhead.kernels.recurrence.reference import ReferenceKernel
from polyhead.kernels.recurrence.triton import TritonRecurrence

KERNELS: dict[str, RecurrenceKernel] = {
    kernel.name: kernel
    for kernel in (NativeKernel(), TritonRecurrence(), ChunkedKernel(), ReferenceKernel())
}

__all__ = ["KERNELS", "RecurrenceKernel"]
