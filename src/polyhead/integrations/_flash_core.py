"""What the functions of flash_attn share: its layout, masks and numbers as polyhead's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhead.integrations._masks import all_of
from polyhead.kernels.dispatch import attention
from polyhead.semantics import ALiBi, Causal, Mask, Window

State = tuple[Tensor, Tensor | None]
"""Output in flash_attn's layout, and lse where it was asked for."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None,
    slopes: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> State:
    """``attention`` in flash_attn's layout, ``[B, T, H, D]``, with slopes ``[H]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = None if slopes is None else ALiBi(slopes)
    lse = None
    if return_lse:
        out, lse = attention(q, k, v, mask=mask, bias=bias, return_lse=True, **options)
    else:
        out = attention(q, k, v, mask=mask, bias=bias, **options)
    return out.transpose(1, 2).contiguous(), lse


def by_slopes(
    slopes: Tensor | None, batch: int, attend: Callable[[slice, Tensor | None], State]
) -> State:
    """All rows of the batch at once, or one by one where each has slopes of its own."""
    if slopes is None or slopes.ndim == 1:
        return attend(slice(None), slopes)
    if len(slopes) != batch:
        raise ValueError(f"alibi_slopes must be [H] or [B, H] with B = {batch}: got {len(slopes)}")
    rows = [attend(slice(row, row + 1), slopes[row]) for row in range(batch)]
    lses = [lse for _, lse in rows if lse is not None]
    return torch.cat([out for out, _ in rows]), torch.cat(lses) if lses else None


def pattern(T: int, S: int, causal: bool, window_size: tuple[int, int]) -> Mask | None:
    """flash_attn's causal and window: keys from query − left to query + right."""
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be (left, right), −1 for unlimited: got {window_size}")
    if causal:
        right = 0
    if left < 0 and right < 0:
        return None
    window = None
    if left >= 0 or right > 0:
        # Window counts the query itself; one of T + S keys is unlimited.
        window = Window(
            left + 1 if left >= 0 else max(1, T + S), ahead=right if right > 0 else None
        )
    return all_of(Causal() if right == 0 else None, window)


def softcap_of(softcap: float) -> float | None:
    if softcap < 0.0:
        raise ValueError(f"softcap must be positive, or 0.0 for off: got {softcap}")
    return softcap or None


def kernel_for(deterministic: bool) -> str:
    return "tiled" if deterministic else "auto"


def boundaries(name: str, cumulative: Tensor, longest: int, total: int | None) -> list[int]:
    """``cu_seqlens`` as numbers, checked."""
    ends = [int(end) for end in cumulative.tolist()]
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not ends or ends[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_{name} must begin with 0 and never fall: got {ends}")
    if total is not None and ends[-1] > total:
        raise ValueError(f"cu_seqlens_{name} ends at {ends[-1]}: {name} has {total} tokens")
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{name} is {longest}, but a sequence has {max(lengths)} tokens"
        )
    return ends
