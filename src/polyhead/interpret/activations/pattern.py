"""Scores and weights of one call of attention as matrices, for those who ask for them.

    weights = softmax(scores)       scores: scaled, capped, biased, −∞ where masked
    out     = weights · V

The kernels never make these matrices; here they are made by the formula of the reference, and are
differentiable. A head's output is computed from them only where a trace changes them.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.interpret.kept import own, weights_of
from polyhead.semantics import Call, DenseSource, KeyValueSource
from polyhead.semantics.arguments import call_of
from polyhead.semantics.normalizer import normalized
from polyhead.semantics.scores import (
    accumulation_dtype,
    fold,
    sees_nonfinite,
    unfold,
    zero_nonfinite,
)
from polyhead.semantics.weights import log_weight_rows


class Pattern:
    """The scores and weights of one call.

    Args:
        q: ``[B, H, T, D]``.
        source: Keys and values.
        options: What the layer gives to ``attention``.

    Raises:
        UnsupportedError: Dropout is on.
    """

    def __init__(self, q: Tensor, source: KeyValueSource, **options: Any) -> None:
        dropout_p, _ = options.pop("dropout_p", 0.0), options.pop("kernel", None)
        if dropout_p:
            raise UnsupportedError(
                "scores and weights are traced without dropout: call model.eval() first"
            )
        given: dict[str, Any] = dict.fromkeys(
            ("mask", "bias", "scale", "softcap", "sinks", "q_positions")
        )
        given |= options
        self.call: Call = call_of(
            q, source, None, **given, kv_positions=None, seed=None, dropout_p=0.0, return_lse=False
        )

    def kept(self) -> Pattern:
        """The same with keys of its own, because a cache would overwrite them; without values."""
        k = own(self.call.source.gather()[0])
        found = Pattern.__new__(Pattern)
        source = DenseSource.made_from(self.call.source, k, k[..., :0])
        found.call = replace(self.call, source=source)
        return found

    def scores(self) -> Tensor:
        """``[B, H, T, S]`` in float32 (float64 for float64), −∞ where masked."""
        call = self.call
        nothing = call.q.new_zeros(call.q.shape[:-1], dtype=accumulation_dtype(call.q.dtype))
        return log_weight_rows(
            call.q,
            call.source.gather()[0],
            nothing,
            call.spec,
            call.q_tokens,
            call.source.tokens,
        )

    def weights(self, scores: Tensor | None = None) -> Tensor:
        """``[B, H, T, S]`` in the dtype of the scores; a row sums to 1 less a sink's share.

        Args:
            scores: In the place of its own.
        """
        scores, call = self.scores() if scores is None else scores, self.call
        if call.spec.normalizer is not None:
            return normalized(call.spec.normalizer, scores, call.q_tokens, call.source.tokens)
        return weights_of(scores, call.spec.sinks)

    def out(self, weights: Tensor) -> Tensor:
        """``[B, H, T, V]`` in the dtype of the queries."""
        call = self.call
        k, v = call.source.gather()
        v, bad = v.to(weights.dtype), None
        if call.spec.mask is not None:
            _, v, bad = zero_nonfinite(k, v)
        out = unfold(fold(weights, v.shape[1]) @ v, weights.shape[1])
        if bad is not None and call.spec.mask is not None:
            visible = call.spec.mask.visible(call.q_tokens, call.source.tokens, weights.device)
            out = out.masked_fill(sees_nonfinite(visible, bad, out.shape[1])[..., None], torch.nan)
        return out.to(call.q.dtype)
