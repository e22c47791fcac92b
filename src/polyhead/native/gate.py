"""Which tensors native code may be given: those that lie in memory as they say.

A DTensor, a FakeTensor or any other subclass has no address of its own, or one whose content is
not its value; a negated view holds the opposite of its value.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = (Tensor, torch.nn.Parameter)
"""Exact types of tensors whose memory is their value."""


def stranger(tensors: Iterable[Tensor]) -> str | None:
    """What kind of tensor among these native code cannot be given, or None.

    A FakeTensor is none: torch's operators, of which native code is one, take those.
    """
    for x in tensors:
        kind = type(x)
        if kind not in PLAIN and kind is not FakeTensor:
            return f"a {kind.__name__}"
        if kind is not FakeTensor and (x.is_neg() or x.is_conj()):
            return "a tensor that is a negated or conjugated view"
    return None


def is_fake(tensors: Iterable[Tensor]) -> bool:
    """Whether operators would see no numbers: fake tensors, or a mode that watches operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(type(x) is FakeTensor for x in tensors)
