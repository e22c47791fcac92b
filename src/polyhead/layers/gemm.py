"""When linear layers use the native GEMV or GEMM instead of torch's.

As many rows as a decoding step takes, of every dtype: decoding waits for weights to be read, and a
step has the bits of its modules. More in the dtypes in which the native product is as fast as
torch's or faster: on AVX2 in all, with vectors of 16 in float32 and float16, and in bfloat16 with
instructions for pairs of it. All of every dtype, where each must have the bits that it has alone,
and where weights are blocks.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules import module as torch_module

from polyhead import native
from polyhead.native import batch_invariant
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.native.code import Code


def code_for(x: Tensor) -> Code | None:
    """Native code, if it may compute on x and there are no global hooks."""
    code = native.code_for(x)  # checked first: under tracing, a comparison would fix the length
    if code is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    return code if x.numel() else None


def code_for_few_rows(x: Tensor) -> Code | None:
    """The same for as many rows as a native decoding step takes."""
    code = code_for(x)
    return code if code is None or _has_few_rows(x) else None


def code_for_gemm(x: Tensor) -> Code | None:
    """The same for any number of rows where a product is not slower than torch's."""
    code = code_for(x)
    return code if code is None or _has_few_rows(x) or x.dtype in code.dtypes else None


def as_rows(x: Tensor) -> Tensor:
    """``[rows, features]``, the last dimension dense."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _has_few_rows(x: Tensor) -> bool:
    return batch_invariant.is_enabled() or x.numel() <= MAX_STEP_ROWS * x.shape[-1]
