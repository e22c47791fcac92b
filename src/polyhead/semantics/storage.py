"""Whether a tensor's storage holds what its shape and strides reach: it may have been resized.

torch's own operations do not check, and would read freed memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import NotPlainError
from polyhead.semantics.tokens import is_traced


def check_storage(name: str, x: Tensor) -> None:
    """Raises NotPlainError if it does not; checks only plain tensors on the CPU."""
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or is_traced(x):
        return
    if x.layout is not torch.strided or not x.numel():
        return
    if x.is_contiguous():  # several times as fast
        last = x.numel() - 1
    else:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    need = (x.storage_offset() + last + 1) * x.itemsize
    held = x.untyped_storage().nbytes()
    if need > held:
        raise NotPlainError(
            f"the storage of {name} holds {held} bytes, its shape and strides need {need}: was it "
            "resized?"
        )
