"""Which tensors native code may be given: those whose memory is their value.

csrc/module/tensor_check.h checks every tensor that native code is given, and raises
``NotPlainError`` for one that is not plain. These functions test tensors beforehand, so that
callers can choose another way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from polyhead.native import batch_invariant
from polyhead.native.interface import differences

try:
    from polyhead.native import _native  # type: ignore[attr-defined]
except ImportError:
    _native = None
DIFFERENCES: list[str] = [] if _native is None else differences(_native)
"""Why an existing compiled module is not used: it was compiled from other sources."""
MODULE: ModuleType | None = None if DIFFERENCES else _native
"""The compiled code that reads what these files give it, or None."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Exact types of tensors whose memory may be their value."""


def unsupported_tensor_kind(tensors: Iterable[Tensor]) -> str | None:
    """Name of the first unsupported tensor type, or None.

    FakeTensors are allowed: torch's operators, of which native code is one, take those.
    """
    if MODULE is None:
        return None
    why: str | None = MODULE.unsupported_tensor_kind(*tensors)
    if why is not None and any(type(x) is FakeTensor for x in tensors):
        why = MODULE.unsupported_tensor_kind(*(x for x in tensors if type(x) is not FakeTensor))
    return why


def is_plain(x: Tensor) -> bool:
    """Whether the memory of x is its value."""
    return MODULE is not None and MODULE.unsupported_tensor_kind(x) is None


def is_exported_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` records here, which knows torch's own operators alone."""
    onnx = sys.modules.get("torch.onnx")  # slow to import, done where a model is exported
    return onnx is not None and onnx.is_in_onnx_export()


# As torch.compiler.assume_constant_result writes.
is_exported_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_fake(tensors: Iterable[Tensor]) -> bool:
    """Whether operators would see no numbers: fake tensors, or a mode that watches operators."""
    return batch_invariant.is_watched() or any(type(x) is FakeTensor for x in tensors)
