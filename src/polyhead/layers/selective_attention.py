"""Attention whose queries choose blocks of keys; the rest is ``MultiHeadAttention``.

    out[t] = attention of query t to the keys of the blocks that it chose, up to itself

How they choose is a part of the layer: ``polyhead.layers.selectors``.

Shape letters: B batch, H query heads, T queries, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import Tensor

from polyhead.config import AttentionConfig, SelectiveAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import check_layer_cache
from polyhead.layers.handed import Handed
from polyhead.layers.registry import register_builder
from polyhead.layers.selectors import Choice, build_selector
from polyhead.layers.selectors.places import Places
from polyhead.semantics import Causal, DenseSource, KeyValueSource, Mask


class SelectiveAttention(MultiHeadAttention):
    """``MultiHeadAttention`` to the blocks of keys that a selector chooses; built from its config.

    It is causal whatever the mask, and takes no context. No gradient flows through the choice. A
    cache of it is a ``LayerCache`` of the layout's memories.

    Attributes:
        selector: What chooses, a ``BlockSelector``.
    """

    config_class: ClassVar[type[AttentionConfig]] = SelectiveAttentionConfig
    config: SelectiveAttentionConfig

    def _add_modules(self) -> None:
        self.selector = build_selector(self.embed_dim, self.config.selector, self.config)
        self._window = Causal() if self._window is None else Causal() & self._window
        self._causal_window = self._window

    def _check_cache(self, cache: Any) -> None:
        check_layer_cache(cache)

    def _self_attention(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: Any,
        handed: Handed | None,
    ) -> tuple[Tensor, KeyValueSource, Mask | None]:
        at: int | Tensor = 0 if positions is None else positions
        if cache is None:
            q, k, v = self._project(x, at)
            dense = DenseSource(k, v, positions)
            places = Places.of(x, dense, positions)
            call = Choice(x, q, dense, places, at, positions, self.rope, None)
            return q, dense, self.selector(call)
        if positions is None:
            at = cache.length
        q, k, v = self._project(x, at)
        with cache.step(x, positions) as step:
            source = step.append("kv", k, v)
            places = Places.of(x, source, positions, step.before or [0] * len(x))
            chosen = self.selector(Choice(x, q, source, places, at, positions, self.rope, step))
        return q, source, chosen

    def _cross_attention(self, *_: Any) -> NoReturn:
        raise ValueError("this layer chooses keys of its own input: got a context")


register_builder(SelectiveAttentionConfig, SelectiveAttention.from_config)
