"""What is kept of one attention call: queries, keys and log-sum-exp, from which all weights follow.

    p_ij = exp(score_ij − lse_i)

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from polyhead.layers.record import AttentionRecord
from polyhead.semantics import Documents, Mask, Specification, TensorBias, Tokens
from polyhead.semantics.reference import softmax
from polyhead.semantics.state import sinks_of_rows
from polyhead.semantics.weights import log_weight_rows, weight_rows


class TokenIds(NamedTuple):
    """Which tokens the queries and keys of a call are; below 0 where that is not known.

    Attributes:
        queries: ``[1 or B, T]``.
        keys: ``[1 or B, S]``.
        preceding: ``[1 or B, S]`` the token just before each key.
    """

    queries: Tensor
    keys: Tensor
    preceding: Tensor


@dataclass(frozen=True, eq=False)
class KeptCall:
    """One call of attention, without its values and its output.

    Attributes:
        q: ``[B, H, T, D]`` as the scores used them (after rotary).
        k: ``[B, G, S, D]`` likewise; head h reads kv head ``kv_heads[h]``.
        lse: ``[B, H, T]`` natural log-sum-exp, −∞ for a query that sees nothing.
        spec: The attention specification of the call (mask, bias, scale, …), for these heads.
        q_tokens: Positions and places of the queries.
        k_tokens: Positions and places of the keys.
        kv_heads: The kv head of every query head.
        ids: The tokens of queries and keys, or None.
        documents: Lengths of the documents that the keys belong to, or None.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    spec: Specification
    q_tokens: Tokens
    k_tokens: Tokens
    kv_heads: tuple[int, ...]
    ids: TokenIds | None = None
    documents: Documents | None = None

    @classmethod
    def of(cls, record: AttentionRecord) -> Self:
        """The call of a softmax that a layer has shown; its tensors are not copied."""
        heads = record.q.shape[1]
        group = heads // record.k.shape[1]
        bias = record.bias
        return cls(
            q=record.q.detach(),
            k=record.k.detach(),
            lse=record.lse.detach(),
            spec=Specification(
                scale=record.scale,
                mask=record.mask,
                bias=TensorBias(bias) if isinstance(bias, Tensor) else bias,
                softcap=record.softcap,
                sinks=None if record.sinks is None else record.sinks.detach(),
            ),
            q_tokens=record.q_tokens,
            k_tokens=record.kv_tokens,
            kv_heads=tuple(head // group for head in range(heads)),
            documents=_documents_of(record.mask),
        )

    def of_heads(self, heads: Sequence[int]) -> Self:
        """The same call for some of its heads, with the keys that they read and no others."""
        kv_heads = [self.kv_heads[head] for head in heads]
        used = sorted(set(kv_heads))
        return replace(
            self,
            q=self.q[:, list(heads)],
            k=self.k[:, used],
            lse=self.lse[:, list(heads)],
            spec=self.spec.of_heads(heads),
            kv_heads=tuple(used.index(kv_head) for kv_head in kv_heads),
        )

    def owned(self) -> Self:
        """The same call in its own memory, because a cache would overwrite its keys."""
        return replace(self, q=own(self.q), k=own(self.k), lse=own(self.lse))

    @property
    def nbytes(self) -> int:
        """Bytes of q, k, lse and the token ids."""
        tensors = [self.q, self.k, self.lse, *(() if self.ids is None else self.ids)]
        return sum(x.numel() * x.element_size() for x in tensors)

    @cached_property
    def _specs(self) -> list[Specification]:
        return [self.spec.of_heads([head]) for head in range(self.q.shape[1])]

    def row(self, query: int) -> Tensor:
        """The weights of one query in all heads, ``[B, H, S]``, by one product."""
        group = len(self.kv_heads) // self.k.shape[1]
        in_order = self.kv_heads == tuple(head // group for head in range(len(self.kv_heads)))
        return weight_rows(
            self.q[:, :, query : query + 1],
            self.k if in_order else self.k[:, list(self.kv_heads)],
            self.lse[:, :, query : query + 1],
            self.spec,
            self.q_tokens.slice(query, query + 1),
            self.k_tokens,
        )[:, :, 0]

    def log_weights(self, head: int, rows: Tokens, keys: Tokens) -> Tensor:
        """The logarithms of one head's weights on a tile, ``[B, 1, rows, keys]``."""
        part = slice(rows.start, rows.start + rows.length)
        kv_head = self.kv_heads[head]
        return log_weight_rows(
            self.q[:, head : head + 1, part],
            self.k[:, kv_head : kv_head + 1, keys.start : keys.start + keys.length],
            self.lse[:, head : head + 1, part],
            self._specs[head],
            rows,
            keys,
        )


def _documents_of(mask: Mask | None) -> Documents | None:
    """The packed documents that a mask keeps apart, if it does."""
    parts = () if mask is None else mask.walk()
    return next((part for part in parts if isinstance(part, Documents)), None)


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of whole rows of scores ``[B, H, T, S]``, differentiable.

    Args:
        scores: Masked, in float32 or more.
        sinks: ``[H]``, or ``[1 or B, H, T]`` of these rows.
    """
    weights, lse = softmax(scores)
    if sinks is None:
        return weights
    return weights * torch.sigmoid(lse - sinks_of_rows(sinks).to(lse))[..., None]


def own(tensor: Tensor) -> Tensor:
    """The tensor; copied if it lies in a larger store, which it would keep alive."""
    held = tensor.untyped_storage().nbytes()
    return tensor.clone() if held > tensor.numel() * tensor.element_size() else tensor


def token_ids(ids: Tensor, call: KeptCall) -> TokenIds:
    """The tokens of a call's queries and keys.

    Args:
        ids: ``[1 or B, n]`` the sequence. Where the call has n queries and n keys they are its own;
            otherwise (a cache) each token is told by its position.
    """
    if ids.shape[1] == call.k_tokens.length == call.q_tokens.length:
        positions = positions_of(call.k_tokens, ids.device)
        follows = (positions[:, 1:] - positions[:, :-1]) == 1
        before = ids[:, :-1].masked_fill(~follows, -1)
        first = before.new_full((before.shape[0], 1), -1)
        return TokenIds(ids, ids, torch.cat([first, before], dim=1))
    of_keys = positions_of(call.k_tokens, ids.device)
    return TokenIds(
        _at(ids, positions_of(call.q_tokens, ids.device)), _at(ids, of_keys), _at(ids, of_keys - 1)
    )


def positions_of(tokens: Tokens, device: torch.device) -> Tensor:
    """``[1 or B, length]`` positions."""
    positions = tokens.position_tensor(device)
    return positions[None] if positions.ndim == 1 else positions


def _at(ids: Tensor, positions: Tensor) -> Tensor:
    """The tokens at positions ``[1 or B, n]``, −1 beyond the sequence."""
    rows = max(ids.shape[0], positions.shape[0])
    known = (positions >= 0) & (positions < ids.shape[1])
    found = ids.expand(rows, -1).gather(1, torch.where(known, positions, 0).expand(rows, -1))
    return found.masked_fill(~known, -1)
