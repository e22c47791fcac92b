"""Self- and cross-attention in one softmax, with the same projections of keys and values.

    head_h = Attention(x Wq_h, [x Wk_g; c Wk_g], [x Wv_g; c Wv_g]), g = h // (H / G)

Queries see the tokens up to their own, within the window, and the whole context c. Queries and the
tokens' keys are rotated, those of the context are not (Zhang et al. 2025, "T5Gemma 2").

Shape letters: B batch, H query heads, G kv heads, T tokens, S tokens of the context, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from polyhead.caches import KeyValueCache
from polyhead.config import AttentionConfig, MergedAttentionConfig
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.attention_parts import check_cache, ragged_positions
from polyhead.layers.registry import register_builder
from polyhead.layers.sparse_encoder import KeySet, attend_key_sets
from polyhead.semantics import Causal, Mask


class MergedAttention(MultiHeadAttention):
    """``MultiHeadAttention`` to its own input and to a context; built from its config.

    Hooks are shown one call, whose keys are the tokens and behind them the context.
    """

    config_class: ClassVar[type[AttentionConfig]] = MergedAttentionConfig

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
        bias: Any = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        context_cache: KeyValueCache | None = None,
        kernel: str = "auto",
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            context: ``[B, S, E]``.
            *more: Refused.
            mask: Who may look at whom among the tokens; None: ``Causal()``. The window is added.
            context_mask: Who may look at which tokens of the context; None: everything is visible.
            bias: Added to the scores of the tokens.
            positions: ``[T]`` or ``[B, T]`` of ``x``; default: they follow on from the cache.
            cache: Of the tokens.
            context_cache: Of the context: filled where it is empty, and read alone afterwards. One
                of B rows serves a batch of B · K, whose rows b · K to b · K + K − 1 share row b.
            kernel: ``"auto"`` or the name of a kernel.
            **unknown: Refused.

        Raises:
            ValueError: No context, or shapes that do not fit.
            TypeError: An argument of another kind.
        """
        if more or unknown or x.ndim != 3 or x.shape[2] != self.embed_dim:
            return super().forward(x, None, *more, **unknown)  # which says why
        if context is None:
            raise ValueError("merged attention needs a context: got none")
        for each in (cache, context_cache):
            if each is not None:
                check_cache(each)
        held = 0 if context_cache is None else len(context_cache.lengths)
        if held and len(x) % held:
            raise ValueError(
                f"rows that share a context are a multiple of its {held}: got {len(x)} rows"
            )
        beside = self._context_source(context, len(x), None, None, context_cache)
        if positions is None and cache is not None:
            positions = ragged_positions(cache, x)
        q, source, _ = self._self_attention(x, positions, cache, None)
        mask = Causal() if mask is None else mask
        seen = mask if self._window is None else self._with_window(mask)
        heads = attend_key_sets(
            self,
            q,
            (KeySet(source, seen, bias, positions), KeySet(beside, context_mask)),
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout if self.training else 0.0,
            kernel=kernel,
        )
        return self._output(x, self._edited(heads))


register_builder(MergedAttentionConfig, MergedAttention.from_config)
