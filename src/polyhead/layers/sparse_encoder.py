"""One softmax over several sets of keys, each with a mask and a bias of its own.

Attention to each set is a state, and states over disjoint keys merge exactly; so a layer that sees
a window and some tokens far away needs no mask of T × S.

Shape letters: B batch, H query heads, T queries, S keys of all sets, V value size.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.kernels.dispatch import attention
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.handed import Handed
from polyhead.layers.hooks import Hooked
from polyhead.layers.record import AttentionRecord, hooks_here
from polyhead.semantics import (
    Bias,
    DenseSource,
    Keep,
    KeyLengths,
    KeyValueSource,
    Mask,
    Tokens,
    merge_states,
)
from polyhead.semantics.arguments import query_tokens, with_source_mask


class KeySet(NamedTuple):
    """Some of the keys of a call.

    Attributes:
        source: Keys and values; of fewer rows than the queries, where rows side by side share one.
        mask: Which of them a query sees.
        bias: Added to the scores.
        q_positions: Positions of the queries among these keys; None: the last query lines up with
            the last key.
        times: How many times each key counts.
    """

    source: KeyValueSource
    mask: Mask | None = None
    bias: Bias | None = None
    q_positions: Tensor | None = None
    times: int = 1


def attend_key_sets(
    layer: Hooked,
    q: Tensor,
    sets: Sequence[KeySet],
    *,
    shown: Mask | None = None,
    **options: Any,
) -> Tensor:
    """The heads' outputs ``[B, H, T, V]``; hooks of the layer are shown one call.

    Args:
        layer: The layer that attends.
        q: ``[B, H, T, D]``.
        sets: Of the keys, disjoint.
        shown: What hooks are told to be the mask, where the first set's source has all keys; None:
            they are shown the keys of all sets, one after the other, with mask and bias drawn.
        **options: Further arguments of ``attention``; ``scale`` is one of them.
    """
    outs, lses = [], []
    for seen in sets:
        rows = _folded(q, seen.source.batch)
        out, lse = attention(
            rows, seen.source, mask=seen.mask, bias=seen.bias, q_positions=seen.q_positions,
            return_lse=True, **options,
        )  # fmt: skip
        if rows is not q:
            out, lse = _unfolded(out, len(q)), _unfolded(lse, len(q))
        outs.append(out)
        lses.append(lse + math.log(seen.times) if seen.times != 1 else lse)
    heads, lse = merge_states(outs, lses)
    if layer._hooks and (hooks := hooks_here(layer._hooks)):
        first = sets[0]
        q_tokens = query_tokens(q, first.source, first.q_positions)
        made = _drawn(q, sets) if shown is None else (first.source, shown, None)
        source, mask, bias = made
        k, v = source.gather()
        record = AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            mask=mask,
            bias=bias,
            scale=options["scale"],
            softcap=options.get("softcap"),
            sinks=None,
            q_tokens=q_tokens,
            kv_tokens=source.tokens,
            out=heads,
            lse=lse,
        )
        for hook in hooks:
            hook(record)
    return heads


def _folded(q: Tensor, batch: int) -> Tensor:
    """``[B · K, H, T, D]`` as ``[B, H, K · T, D]``, for so many rows B of keys."""
    if len(q) == batch:
        return q
    return q.reshape(batch, -1, *q.shape[1:]).transpose(1, 2).flatten(2, 3)


def _unfolded(x: Tensor, batch: int) -> Tensor:
    """``[B, H, K · T, ...]`` as ``[B · K, H, T, ...]``."""
    shape = (*x.shape[:2], batch // len(x), -1, *x.shape[3:])
    return x.reshape(shape).transpose(1, 2).flatten(0, 1)


def _drawn(q: Tensor, sets: Sequence[KeySet]) -> tuple[KeyValueSource, Mask, Tensor]:
    """All keys as one source, their mask and their bias ``[B, H, T, S]``."""
    masks, biases, read = [], [], []
    for seen in sets:
        source, rows = seen.source, _folded(q, seen.source.batch)
        shape = (*rows.shape[:3], source.tokens.length)
        tokens = query_tokens(rows, source, seen.q_positions), source.tokens
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
        added = q.new_full((), math.log(seen.times))
        if (mask := with_source_mask(seen.mask, source)) is not None:
            allowed = mask.visible(*tokens, q.device)
        if seen.bias is not None:
            added = added + seen.bias.tile(*tokens, rows)
        masks.append(_unfolded(allowed.expand(shape), len(q)))
        biases.append(_unfolded(added.expand(shape), len(q)))
        times = len(q) // source.batch
        read.append([each.repeat_interleave(times, dim=0) for each in source.gather()])
    keys, values = (torch.cat(each, dim=2) for each in zip(*read, strict=True))
    joined = DenseSource.over(keys, values, Tokens.of(keys.shape[2]))
    return joined, Keep(torch.cat(masks, dim=3)), torch.cat(biases, dim=3)


class SparseEncoderAttention(MultiHeadAttention):
    """Base of an encoder's attention over sets of keys: self-attention without a cache."""

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Any = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            context: None.
            *more: Refused.
            mask: Padding: ``KeyLengths(lengths)`` or None.
            bias: A ``Bias`` by distance, where the layout takes one.
            positions: None: tokens are counted from 0.
            context_positions: None.
            cache: None.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What the call and earlier layers hand on.
            **unknown: Refused.

        Raises:
            UnsupportedError: A context, a cache, positions or another mask.
            ValueError: Shapes that do not fit.
        """
        if more or unknown or x.ndim != 3 or x.shape[2] != self.embed_dim:
            return super().forward(x, context, *more, **unknown)  # which says why
        for name, given in (("context", context), ("cache", cache), ("positions", positions)):
            if given is not None or context_positions is not None:
                raise UnsupportedError(
                    f"{type(self).__name__} is an encoder's self-attention to tokens counted from "
                    f"0: got {name}"
                )
        if not (mask is None or type(mask) is KeyLengths):
            raise UnsupportedError(
                f"{type(self).__name__} understands no mask but KeyLengths: got {mask!r}"
            )
        options = {
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout if self.training else 0.0,
            "kernel": kernel,
        }
        if isinstance(bias, Tensor) or (bias is not None and not self.takes_bias):
            raise UnsupportedError(f"{type(self).__name__} takes no such bias: got {bias!r}")
        return self._output(x, self._edited(self._heads(x, mask, bias, handed, options)))

    takes_bias = False
    """Whether a call may have a bias by distance."""

    @abstractmethod
    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        """The heads' outputs ``[B, H, T, V]``; ``options`` are further arguments of attention."""


def lengths_of_rows(mask: KeyLengths | None, x: Tensor) -> Tensor:
    """``[B]`` tokens of each row of ``x`` ``[B, T, E]`` that are not padding."""
    if mask is None:
        return torch.full((len(x),), x.shape[1], device=x.device)
    return mask.length.tensor(x.device).expand(len(x))


def both(mask: Mask, padding: KeyLengths | None) -> Mask:
    """A mask that also hides padding."""
    return mask if padding is None else mask & padding
