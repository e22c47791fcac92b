"""polyhead's own kernels for GPUs, in Triton: ``device/`` is what runs there.

Read in this order: ``device/scores``, ``device/forward``, ``device/merge``, ``device/backward``,
``blocks``, ``launch``, ``self_test``, ``kernel``; for heads with a state ``device/recurrence``,
``recurrence``. Triton is imported at the first launch.
"""

from polyhead.kernels.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
