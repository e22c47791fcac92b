"""Launches a kernel of ``device/``, and says what the first call of a variant waits for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.triton.interpreting import interpreting
from polyhead.kernels.triton.waiting import waiting

_launched: set[tuple[Any, ...]] = set()


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], like: Tensor, /, *arguments: Any, **named: Any
) -> None:
    """Launches a kernel; the first call of a variant says that it waits for the compiler."""
    constants = (value for name, value in named.items() if name.isupper())
    variant = id(kernel), like.device, like.dtype, *constants
    if variant in _launched or interpreting():
        kernel[grid](*arguments, **named)
        return
    with waiting(f"compiling a Triton kernel for {like.dtype} on {like.device}"):
        kernel[grid](*arguments, **named)
    _launched.add(variant)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
