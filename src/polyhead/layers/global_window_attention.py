"""Attention within a window, with global tokens: they see all tokens, and all tokens see them.

    out_i = Attention(x_i Wq, x_N Wk, x_N Wv)       N: the window of token i, and the global tokens
    out_g = Attention(x_g Wq', x Wk', x Wv')        of a global token g: all tokens

Beltagy et al. 2020, "Longformer". Window and global tokens are two sets of keys, so the work
grows with T · (window + global tokens).

Shape letters: B batch, H query heads, T tokens, D head size, V value size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, GlobalWindowAttentionConfig
from polyhead.config.layout import EMBEDDING, GLOBAL_TOKENS
from polyhead.kernels.dispatch import attention
from polyhead.layers import fused
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import (
    KeySet,
    SparseEncoderAttention,
    attend_key_sets,
    both,
    lengths_of_rows,
)
from polyhead.semantics import Bias, DenseSource, Drop, Keep, KeyLengths, Window


class GlobalWindowAttention(SparseEncoderAttention):
    """``MultiHeadAttention`` of an encoder's window, with ``q_global_proj``, ``k_global_proj`` and
    ``v_global_proj`` for the rows of global tokens; built from its config.

    The call's global tokens, ``[B, T]`` bool, are handed on by the model. A hook is shown one call,
    in which the rows of global tokens have the window's queries.
    """

    config_class: ClassVar[type[AttentionConfig]] = GlobalWindowAttentionConfig
    config: GlobalWindowAttentionConfig

    q_global_proj: nn.Module
    k_global_proj: nn.Module
    v_global_proj: nn.Module

    def _add_modules(self) -> None:
        config, E = self.config, self.embed_dim
        for name in ("q", "k", "v"):
            like = getattr(self, f"{name}_proj")
            biased = like.bias is not None
            self.add_module(f"{name}_global_proj", nn.Linear(E, like.out_features, bias=biased))
        assert config.window is not None  # the configuration says so
        self._band = Window(config.window, config.window_ahead)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        q, k, v = self._project(x, 0)
        source = DenseSource(k, v)
        tokens = self._global_tokens(x, handed)
        real = torch.arange(x.shape[1], device=x.device) < lengths_of_rows(mask, x)[:, None]
        tokens = tokens & real
        counts = tokens.sum(dim=1)
        most = int(counts.max())
        if not most:
            return self._attend(q, source, mask=both(self._band, mask), **options)
        # The places of a row's global tokens, and of others behind them.
        places = (~tokens).int().argsort(dim=1, stable=True)[:, :most]
        columns = tokens[:, None, None]
        heads = attend_key_sets(
            self,
            q,
            (
                KeySet(source, both(self._band & Drop(columns), mask)),
                KeySet(DenseSource(_at(k, places, 2), _at(v, places, 2)), KeyLengths(counts)),
            ),
            shown=both(self._band | Keep(columns), mask),
            **options,
        )
        k, v = fused.linears(x, self.k_global_proj, self.v_global_proj)
        q = linear(_at(x, places, 1), self.q_global_proj)
        k, v = (_split(y, self.num_kv_heads) for y in (k, v))
        rows = attention(_split(q, self.num_heads), k, v, mask=mask, **options)
        spread = _at(rows, (tokens.cumsum(dim=1) - 1).clamp(min=0), 2)
        return torch.where(tokens[:, None, :, None], spread, heads)

    def _global_tokens(self, x: Tensor, handed: Handed | None) -> Tensor:
        """``[B, T]`` bool: those of the call, or the configuration's."""
        named = None if handed is None else handed.values.get((EMBEDDING, GLOBAL_TOKENS))
        if named is not None:
            tokens: Tensor = named
            return tokens
        tokens = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        tokens[:, 0] = self.config.global_first
        return tokens


def _split(x: Tensor, heads: int) -> Tensor:
    """``[B, T, heads · D]`` as ``[B, heads, T, D]``."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _at(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """The tokens of ``x`` at ``[B, n]`` places, which are its dimension ``dim``."""
    index = places[:, None, :, None] if dim == 2 else places[..., None]
    shape = [*x.shape]
    shape[dim] = places.shape[1]
    return x.gather(dim, index.expand(shape))


register_builder(GlobalWindowAttentionConfig, GlobalWindowAttention.from_config)
