"""Attention to the keys and values of an earlier layer: this one makes and remembers none.

    head_h = Attention(x Wq_h, K_g, V_g)        K, V of the layer ``keys_of``, in the same call

Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981); the upper half of YOCO (Sun et al.
2024, arXiv 2405.05254); the last layers of Gemma 3n and Gemma 4.

Shape letters: B batch, H query heads, G kv heads, T queries, D head size, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import Tensor

from polyhead.config import AttentionConfig, CrossLayerAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import check_layer_cache
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.registry import register_builder
from polyhead.semantics import KeyValueSource, Mask


class CrossLayerAttention(MultiHeadAttention):
    """``MultiHeadAttention`` without ``k_proj``, ``v_proj`` and ``k_norm``; built by a model alone.

    Its cache counts tokens and holds no numbers.
    """

    config_class: ClassVar[type[AttentionConfig]] = CrossLayerAttentionConfig

    def _self_attention(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: Any,
        handed: Handed | None,
    ) -> tuple[Tensor, KeyValueSource, Mask | None]:
        source: KeyValueSource = handed_to(handed, "keys", self.config.reads)
        at: int | Tensor = 0 if positions is None else positions
        if cache is not None:
            if positions is None:
                at = cache.length
            with cache.step(x, positions):
                pass
        return self._queries(linear(x, self.q_proj), at), source, None

    def _check_cache(self, cache: Any) -> None:
        check_layer_cache(cache)

    def _cross_attention(self, *_: Any) -> NoReturn:
        raise ValueError("this layer reads the keys of another layer: got a context")


register_builder(CrossLayerAttentionConfig, CrossLayerAttention.from_config)
