"""Inputs that native code multiplies by weights: up to 8 rows, as in decoding."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules import module as torch_module

from polyhead import native
from polyhead.native.arguments import MOST_ROWS
from polyhead.native.code import Code


def code_for_rows(x: Tensor) -> Code | None:
    """Native code, if x is a few rows that it may compute on and there are no global hooks."""
    code = native.code_for(x)  # checked first: under tracing, a comparison would fix the length
    if code is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    return code if 0 < x.numel() <= MOST_ROWS * x.shape[-1] else None


def as_rows(x: Tensor) -> Tensor:
    """``[rows, features]``, the last dimension dense."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
