"""Attention within blocks of tokens and to vectors in front of them, which see everything.

    out_i = Attention(n_i Wq, [n_P; n_B] Wk, [n_P; n_B] Wv)     P: the prefix, B: the token's block
    out_p = Attention(n_p Wq, n Wk, n Wv)                       of a vector p of the prefix
    n     = norm(x), of the prefix with weights of its own

Phang et al. 2022, "PEGASUS-X", where every other layer's blocks begin in the middle of the others'.

Shape letters: B batch, H query heads, P vectors of the prefix, T tokens, V value size,
E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead.config import AttentionConfig, GlobalPrefixAttentionConfig
from polyhead.kernels.dispatch import attention
from polyhead.layers.handed import Handed
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import (
    KeySet,
    SparseEncoderAttention,
    attend_key_sets,
    lengths_of_rows,
)
from polyhead.semantics import Bias, Chunk, DenseSource, Keep, KeyLengths, Mask


class GlobalPrefixAttention(SparseEncoderAttention):
    """``MultiHeadAttention`` of blocks and of a prefix; built from its config.

    Its input ``[B, P + T, E]`` has the prefix in front; the mask of a call is about the T tokens. A
    hook is shown one call, of the tokens.

    Attributes:
        norm: Of the tokens.
        global_norm: Of the prefix.
    """

    config_class: ClassVar[type[AttentionConfig]] = GlobalPrefixAttentionConfig
    config: GlobalPrefixAttentionConfig

    def _add_modules(self) -> None:
        self.norm = build_norm(self.embed_dim, self.config.norm)
        self.global_norm = build_norm(self.embed_dim, self.config.norm)

    def _heads(
        self,
        x: Tensor,
        mask: KeyLengths | None,
        bias: Bias | None,
        handed: Handed | None,
        options: dict[str, Any],
    ) -> Tensor:
        P, size = self.config.prefix, self.config.chunk
        assert size is not None  # the configuration says so
        x = torch.cat((self.global_norm(x[:, :P]), self.norm(x[:, P:])), dim=1)
        q, k, v = self._project(x, 0)
        places = torch.arange(x.shape[1] - P, device=x.device)
        inside: Mask = Chunk(size)
        every = None
        if mask is not None:
            lengths = lengths_of_rows(mask, x)
            real = places < lengths[:, None]
            inside, every = inside & Keep(real[:, None, None]), KeyLengths(lengths + P)
        at = places + self.config.stagger
        own = KeySet(DenseSource(k[:, :, P:], v[:, :, P:], at), inside, None, at)
        sets = own, KeySet(DenseSource(k[:, :, :P], v[:, :, :P]))
        tokens = attend_key_sets(self, q[:, :, P:], sets, **options)
        prefix = attention(q[:, :, :P], k, v, mask=every, **options)
        return torch.cat((prefix, tokens), dim=2)


register_builder(GlobalPrefixAttentionConfig, GlobalPrefixAttention.from_config)
