"""Merges what splits of the keys gave into one state.

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i − lse) · out_i

Shape letters: B batch, H query heads, T queries, V value size.
"""

import triton
import triton.language as tl

from polyhead.kernels.triton.device.scores import LN2, LOG2E


@triton.jit(do_not_specialize=["splits"])
def merge(
    outs, lses, out, lse, heads, tokens, splits,
    SPLITS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One row of out ``[B, H, T, V]`` and lse ``[B, H, T]``.

    Args:
        outs: Pointer ``[splits, B, H, T, V]`` float32 and strides by split and row, dense.
        lses: Pointer ``[splits, B, H, T]`` float32, stride by split, dense.
        out, lse: Pointer and strides by batch row, head and token.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    each = tl.load(lses[0] + split * lses[1] + row, mask=split < splits, other=float("-inf"))
    each = each * LOG2E
    peak = tl.max(each, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(each - safe)
    total = tl.sum(share, 0)
    some = tl.where(total == 0.0, 1.0, total)
    columns = tl.arange(0, VALUE)
    mask = (split < splits)[:, None] & (columns < VALUE_DIM)[None, :]
    at = (split * outs[1])[:, None] + row * outs[2] + columns[None, :]
    found = tl.sum(tl.load(outs[0] + at, mask=mask, other=0.0) * (share / some)[:, None], 0)
    token = row % tokens
    head = row // tokens % heads
    batch = row // tokens // heads
    at = batch * out[1] + head * out[2] + token * out[3]
    kind = out[0].dtype.element_ty
    tl.store(out[0] + at + columns, found.to(kind), mask=columns < VALUE_DIM)
    at = batch * lse[1] + head * lse[2] + token * lse[3]
    tl.store(lse[0] + at, tl.where(total == 0.0, float("-inf"), (peak + tl.log2(some)) * LN2))
