"""The functions of the flash_attn package (FlashAttention 2.x), computed by polyhead.

For code that imports flash_attn and must run where that cannot be installed: on CPUs, in float32,
for any head size. Names, argument order and layouts are flash_attn's:

    q [B, T, H, D]    k, v [B, S, G, D]    out [B, T, H, D]    lse [B, H, T] (natural logarithm)
    window_size=(left, right): keys from query − left to query + right; −1 is unlimited
    softcap=0.0 is off; causal lines the last query up with the last key

    from polyhead.integrations.flash_attn import flash_attn_func
    polyhead.integrations.flash_attn.install()     # or: from here on, import flash_attn finds this

Where flash_attn differs from itself, polyhead's definition holds: the lse of a query that may see
nothing is −∞ (flash_attn: +∞).

Shape letters: B batch, T queries, S keys, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.integrations._flash_cache import KeyValueCache, paged, rotate
from polyhead.integrations._flash_core import (
    State,
    attend,
    boundaries,
    by_slopes,
    kernel_for,
    pattern,
    softcap_of,
)
from polyhead.integrations._masks import all_of
from polyhead.semantics import Documents, KeyLengths

Result = Tensor | tuple[Tensor, Tensor, None]

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention; differentiable.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, G, D]``, G a divisor of H.
        v: ``[B, S, G, D]``.
        dropout_p: Dropout probability of the weights; 0 in evaluation.
        softmax_scale: Factor of the scores; default 1/√D.
        causal: Key position ≤ query position, the last query at the last key.
        window_size: Keys seen to the left and right of the query, besides itself; −1: all.
        softcap: c in c · tanh(score / c); 0 is off.
        alibi_slopes: ``[H]`` or ``[B, H]``: −slope · |query − key| is added to the scores.
        deterministic: Use the kernel whose gradients are bit-identical from run to run.
        return_attn_probs: Also return lse, and None in place of the dropout pattern.

    Returns:
        ``[B, T, H, D]``; with ``return_attn_probs`` also lse ``[B, H, T]`` in float32, and None.

    Raises:
        ValueError: Shapes or numbers that do not fit.
        UnsupportedError: ``return_attn_probs`` with dropout, whose pattern is never stored.
    """
    _refuse_pattern(return_attn_probs, dropout_p)
    mask = pattern(q.shape[1], k.shape[1], causal, window_size)

    def attend_rows(rows: slice, slopes: Tensor | None) -> State:
        return attend(
            q[rows], k[rows], v[rows], mask=mask, slopes=slopes, dropout_p=dropout_p,
            scale=softmax_scale, softcap=softcap_of(softcap), kernel=kernel_for(deterministic),
            return_lse=return_attn_probs,
        )  # fmt: skip

    out, lse = by_slopes(alibi_slopes, len(q), attend_rows)
    return out if lse is None else (out, lse, None)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """``flash_attn_func`` with ``kv [B, S, 2, G, D]`` in the place of k and v."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """``flash_attn_func`` with ``qkv [B, T, 3, H, D]`` in the place of q, k and v."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of sequences packed one after the other; differentiable.

    Args:
        q: ``[total_q, H, D]``.
        k: ``[total_k, G, D]``; with ``block_table`` ``[pages, page size, G, D]``.
        v: Values, shaped like ``k``.
        cu_seqlens_q: ``[B + 1]`` cumulative lengths of the query sequences, from 0.
        cu_seqlens_k: ``[B + 1]`` cumulative lengths of the key sequences, from 0.
        max_seqlen_q: Length of the longest query sequence.
        max_seqlen_k: Length of the longest key sequence.
        dropout_p: Dropout probability of the weights; 0 in evaluation.
        softmax_scale: Factor of the scores; default 1/√D.
        causal: In each sequence, its last query at its last key.
        window_size: Keys seen to the left and right of the query; −1: all.
        softcap: c in c · tanh(score / c); 0 is off.
        alibi_slopes: ``[H]`` or ``[B, H]``.
        deterministic: Use the kernel whose gradients are bit-identical from run to run.
        return_attn_probs: Also return lse, and None in place of the dropout pattern.
        block_table: ``[B, pages per sequence]`` indices of the pages that hold a sequence's keys.

    Returns:
        ``[total_q, H, D]`` (tokens after the last sequence are 0); with ``return_attn_probs``
        also lse ``[H, total_q]``, and None.

    Raises:
        ValueError: Boundaries that do not fit the tensors or the longest lengths given.
        UnsupportedError: ``return_attn_probs`` with dropout.
    """
    _refuse_pattern(return_attn_probs, dropout_p)
    starts_q = boundaries("q", cu_seqlens_q, max_seqlen_q, len(q))
    total_k = None if block_table is not None else len(k)
    starts_k = boundaries("k", cu_seqlens_k, max_seqlen_k, total_k)
    if len(starts_q) != len(starts_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must count the same sequences: got "
            f"{len(starts_q) - 1} and {len(starts_k) - 1}"
        )
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "softcap": softcap_of(softcap),
        "kernel": kernel_for(deterministic),
        "return_lse": return_attn_probs,
    }
    if starts_q == starts_k and block_table is None and not _per_row(alibi_slopes):
        used = starts_q[-1]
        documents = Documents([b - a for a, b in pairwise(starts_q)]) if used else None
        mask = all_of(pattern(used, used, causal, window_size), documents)
        q_1THD, k_1SGD, v_1SGD = (x[None, :used] for x in (q, k, v))
        states = [attend(q_1THD, k_1SGD, v_1SGD, mask=mask, slopes=alibi_slopes, **options)]
    else:
        states = []
        for row, ((a, b), (c, d)) in enumerate(
            zip(pairwise(starts_q), pairwise(starts_k), strict=True)
        ):
            pages = None if block_table is None else block_table[row]
            k_row, v_row = (x[c:d] if pages is None else paged(x, pages, d - c) for x in (k, v))
            slopes = alibi_slopes
            if alibi_slopes is not None and _per_row(alibi_slopes):
                slopes = alibi_slopes[row]
            mask = pattern(b - a, d - c, causal, window_size)
            states.append(
                attend(q[None, a:b], k_row[None], v_row[None], mask=mask, slopes=slopes, **options)
            )
    # Tokens after the last sequence belong to none.
    rest = len(q) - starts_q[-1]
    outs = [out[0] for out, _ in states]
    unused = q.new_zeros(rest, q.shape[1], v.shape[-1])
    out = torch.cat([*outs, unused])
    if not return_attn_probs:
        return out
    lses = [lse[0] for _, lse in states if lse is not None]
    precise = torch.promote_types(q.dtype, torch.float32)
    empty = torch.full((q.shape[1], rest), -torch.inf, dtype=precise, device=q.device)
    return out, torch.cat([*lses, empty], dim=-1), None


def _per_row(slopes: Tensor | None) -> bool:
    return slopes is not None and slopes.ndim == 2


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """``flash_attn_varlen_func`` with ``kv [total_k, 2, G, D]`` in the place of k and v."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Result:
    """``flash_attn_varlen_func`` with ``qkv [total, 3, H, D]`` and one set of boundaries."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes new keys and values into a cache, in place, and attends over it. No gradients.

    Args:
        q: ``[B, T, H, D]``.
        k_cache: ``[rows, slots, G, D]``; with ``block_table`` ``[pages, page size, G, D]``.
        v_cache: Cached values, shaped like ``k_cache``.
        k: ``[B, n, G, D]`` written to slots ``cache_seqlens`` and on.
        v: New values, shaped like ``k``.
        rotary_cos: ``[positions, R / 2]``: the first R features of k and q are rotated, at the
            positions of their slots; q at ``cache_seqlens`` and on where attention is causal or
            local, else all of q at ``cache_seqlens``.
        rotary_sin: Sines, shaped like ``rotary_cos``.
        cache_seqlens: Tokens in the cache before this call, one number or ``[B]``; default: all.
        cache_batch_idx: ``[B]`` row of the cache for each row of the batch; default 0 … B − 1.
        cache_leftpad: ``[B]`` first slot of each row that is real.
        block_table: ``[B, pages per sequence]`` which pages hold a row's tokens, in order.
        softmax_scale: Factor of the scores; default 1/√D.
        causal: Key position ≤ query position, the last query at the last key.
        window_size: Keys seen to the left and right of the query; −1: all.
        softcap: c in c · tanh(score / c); 0 is off.
        rotary_interleaved: Rotate features 0 and 1, 2 and 3, …; else 0 and R / 2, ….
        alibi_slopes: ``[H]`` or ``[B, H]``: −slope · |query − key| is added to the scores.
        num_splits: Ignored, accepted for compatibility.
        return_softmax_lse: Also return lse ``[B, H, T]``.

    Returns:
        ``[B, T, H, D]``, with ``return_softmax_lse`` also lse ``[B, H, T]`` in float32.

    Raises:
        ValueError: Arguments that do not fit together, or a cache that is too small.
        UnsupportedError: ``cache_leftpad`` with ``block_table`` or rotary, whose positions
            differ between releases of flash_attn.
    """
    if cache_leftpad is not None and (block_table is not None or rotary_cos is not None):
        other = "block_table" if block_table is not None else "rotary_cos"
        raise UnsupportedError(f"cache_leftpad together with {other}")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError("rotary_cos and rotary_sin must be given together, and with k and v")
    B, T = q.shape[:2]
    cache = KeyValueCache(k_cache, v_cache, cache_seqlens, B, cache_batch_idx, block_table)
    before = cache.lengths
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        local = causal or any(side >= 0 for side in window_size)
        steps = torch.arange(T, device=q.device) if local else torch.zeros(T, dtype=torch.int64)
        angles = (rotary_cos, rotary_sin, rotary_interleaved)
        q = rotate(q, before[:, None] + steps.to(q.device), *angles)
        k = rotate(k, before[:, None] + torch.arange(k.shape[1], device=q.device), *angles)
    if k is not None and v is not None:
        cache.append(k, v)
    after = cache.lengths
    keys, values = cache.read()
    window = pattern(T, keys.shape[1], causal, window_size)
    # The last query of a row stands at the row's own last key.
    full = bool((after == keys.shape[1]).all())
    q_positions = after[:, None] - T + torch.arange(T, device=q.device)

    def attend_rows(rows: slice, slopes: Tensor | None) -> State:
        unpadded = None if cache_leftpad is None else ~KeyLengths(cache_leftpad[rows])
        return attend(
            q[rows], keys[rows], values[rows], slopes=slopes, scale=softmax_scale,
            mask=all_of(window, None if full else KeyLengths(after[rows]), unpadded),
            q_positions=None if full else q_positions[rows], softcap=softcap_of(softcap),
            return_lse=return_softmax_lse,
        )  # fmt: skip

    out, lse = by_slopes(alibi_slopes, B, attend_rows)
    return out if lse is None else (out, lse)


def _refuse_pattern(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        raise UnsupportedError(
            "return_attn_probs with dropout_p > 0: flash_attn returns the dropout pattern then, "
            "which polyhead never stores; without dropout it returns out, lse and None"
        )


def _unpacked(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if packed.ndim < 3 or packed.shape[-3] != count:
        raise ValueError(
            f"{name} must have {count} in its third dimension from the end: got "
            f"{list(packed.shape)}"
        )
    return packed.unbind(-3)


def install() -> ModuleType:
    """Makes ``import flash_attn`` find these functions, where flash_attn is not installed.

    Returns:
        The module put into ``sys.modules`` as ``flash_attn``, and as
        ``flash_attn.flash_attn_interface``.

    Raises:
        RuntimeError: The flash_attn package is installed.
    """
    present = sys.modules.get("flash_attn")
    if present is not None and getattr(present, "__polyhead__", False):
        return present
    if present is not None or importlib.util.find_spec("flash_attn") is not None:
        raise RuntimeError("flash_attn is installed: import it, or uninstall it first")
    module = ModuleType("flash_attn", __doc__)
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    module.__path__ = []
    interface = ModuleType("flash_attn.flash_attn_interface", __doc__)
    interface.__spec__ = importlib.machinery.ModuleSpec(interface.__name__, None)
    for part in (module, interface):
        for name in __all__:
            if name != "install":
                setattr(part, name, globals()[name])
        setattr(part, "__polyhead__", True)  # noqa: B010
        sys.modules[part.__name__] = part
    setattr(module, "flash_attn_interface", interface)  # noqa: B010
    setattr(module, "__version__", "2.8.3+polyhead")  # noqa: B010
    return module
