"""The state of an attention, ``(out, lse)``, and its algebra.

For a query row that has seen a set of keys, ``out`` is the softmax-weighted mean of their values
and ``lse`` the natural logarithm of the sum of the exponentials of their scores. Two states of the
same queries over disjoint keys merge exactly (Milakov & Gimelshein 2018; FlashInfer, Ye et al.
2025); the merge is associative and commutative, with (0, −∞), the row that saw nothing, as its
neutral element. Split keys, prefix sharing, context parallelism and sinks are this one formula:

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i − lse) · out_i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyhead import native

if TYPE_CHECKING:
    from jaxtyping import Float


class State(NamedTuple):
    """``out [B, H, T, V]`` and ``lse [B, H, T]`` (None where the kernel was not asked for it)."""

    out: Tensor
    lse: Tensor | None


def merge_states(
    outs: Sequence[Float[Tensor, "B H T V"]], lses: Sequence[Float[Tensor, "B H T"]]
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]:
    """Merges states of the same queries over disjoint sets of keys into the state of all keys.

    Args:
        outs: Outputs, each ``[B, H, T, V]``.
        lses: Their natural-log log-sum-exps, each ``[B, H, T]``; −∞ for a row that saw nothing.

    Returns:
        ``out`` in the dtype of the first output and ``lse`` in that of the first lse.

    Raises:
        ValueError: No states, or as many outs as lses were not given, or shapes differ.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_states takes as many outs as lses, at least one: got {len(outs)} and "
            f"{len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"merge_states takes outs of one shape [B, H, T, V] and lses [B, H, T]: got "
                f"{list(out.shape)} and {list(lse.shape)} beside {list(outs[0].shape)}"
            )
    stacked = torch.stack(list(lses))
    peak = stacked.amax(dim=0)
    # exp(−∞ − −∞) is NaN: a row that saw nothing anywhere is measured against 0 instead.
    weights = torch.exp(stacked - peak.masked_fill(peak.isneginf(), 0.0))
    total = weights.sum(dim=0)
    some = total.masked_fill(total == 0, 1.0)
    shares = weights / some
    merged = (shares[..., None] * torch.stack([o.to(shares.dtype) for o in outs])).sum(dim=0)
    lse = (peak + torch.log(some)).masked_fill(total == 0, -torch.inf)
    return merged.to(outs[0].dtype), lse


def add_sinks(state: State, sinks: Tensor) -> State:
    """Adds a score per head, or per head and query, to the denominator, without a value.

    Args:
        state: The state over all keys, with its lse.
        sinks: ``[H]`` scores, or ``[1 or B, H, T]`` of each query.

    Returns:
        out · sigmoid(lse − sink), and the lse that includes the sink.
    """
    if state.lse is None:
        raise ValueError("sinks need the lse of the state")
    sink = sinks_of_rows(sinks).to(state.lse.dtype)
    # A row that saw nothing has lse −∞ and out 0; differences with −∞ would give NaN gradients.
    empty = state.lse.isneginf()
    lse = state.lse.masked_fill(empty, 0.0)
    out = _shared(state.out, state.lse, sinks)
    if out is None:
        share = torch.sigmoid(lse - sink).masked_fill(empty, 0.0)
        out = (state.out * share[..., None]).to(state.out.dtype)
    return State(out, torch.where(empty, sink.expand_as(lse), torch.logaddexp(lse, sink)))


def sinks_of_rows(sinks: Tensor) -> Tensor:
    """``[H, 1]`` of scores ``[H]``, and ``[1 or B, H, T]`` as it is: as lse is laid out."""
    return sinks[:, None] if sinks.ndim == 1 else sinks


def _shared(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor | None:
    """``out · sigmoid(lse − sink)`` by native code, as its decoding step does it; or None."""
    code = native.code_for(out)
    if code is None or sinks.ndim != 1:
        return None
    plain = native.is_plain(sinks, sinks) and sinks.dtype in (out.dtype, torch.float32)
    return code.sink(out, lse.contiguous(), sinks) if plain else None
