"""Grouped-tied attention: one state of a kv head is its value, and half of its key.

    [n_h | p_h] = x Wq_h          q_h = [n_h | rotate(p_h)]
    s_g = x Ws_g, r = x Wr        k_g = [first half of s_g | rotate(r)]        v_g = s_g

The rotated half-head r is one for all kv heads, so a cache keeps G · D + D / 2 numbers of a token.
Zadouri et al. 2025, "Hardware-Efficient Attention for Fast Decoding", arXiv 2505.21487 (GTA).

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D head size, E embed size.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from polyhead.caches import KeyValueCache
from polyhead.config import AttentionConfig, GroupedTiedAttentionConfig
from polyhead.layers import fused
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.handed import Handed
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, DenseSource, KeyValueSource, Mask


class GroupedTiedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` on tied keys and values, for self-attention.

    Attributes:
        k_proj: ``[D / 2, E]``, Wr: the half of all keys that is rotated.
        v_proj: ``[G · D, E]``, Ws: the tied states.
    """

    projects_heads = False
    config_class: ClassVar[type[AttentionConfig]] = GroupedTiedAttentionConfig

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, H, T, D]``, half-heads ``[B, 1, T, D / 2]``, states ``[B, 1, T, G · D]``."""
        q, r, states = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
        half = self.head_dim // 2
        q, r = q.view(*q.shape[:2], self.num_heads, -1), r[:, :, None]
        if self.rope is not None:
            turned = self.rope.apply(q[..., half:], positions, head_axis=2)
            q = torch.cat((q[..., :half], turned), dim=-1)
            r = self.rope.apply(r, positions, head_axis=2)
        return q.transpose(1, 2), r.transpose(1, 2), states[:, None]

    def _self_attention(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: KeyValueCache | None,
        handed: Handed | None,
    ) -> tuple[Tensor, KeyValueSource, Mask | Bias | None]:
        q, source, own = super()._self_attention(x, positions, cache, handed)
        return q, DenseSource.remade(source, self._keys_and_values), own

    def _keys_and_values(self, r: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, G, S, D]`` both; values are a view of the states."""
        B, _, S, _ = states.shape
        v = states.view(B, S, self.num_kv_heads, -1).transpose(1, 2)
        shared = r.expand(-1, self.num_kv_heads, -1, -1)
        return torch.cat((v[..., : self.head_dim // 2], shared), dim=-1), v

    def _cross_attention(self, *_: object) -> NoReturn:
        raise ValueError("grouped-tied attention is self-attention: got a context")


register_builder(GroupedTiedAttentionConfig, GroupedTiedAttention.from_config)
