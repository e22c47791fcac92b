"""Hybrid heads: attention and a Mamba-2 mixer that read the same input.

    out = a_out · attention(a_in · x) + b_out · mamba2(b_in · x)

Falcon-H1 (Zuo et al. 2025, arXiv 2507.22448), whose heads of both kinds read one norm of the
stream.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from polyhead.config import AttentionConfig, HybridHeadsConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.attention_parts import check_layer_cache, ragged_positions
from polyhead.layers.mamba2 import Mamba2
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, Mask


class HybridHeads(MultiHeadAttention):
    """``MultiHeadAttention`` with ``mamba``, a ``Mamba2``, made from its data.

    A cache of it is a ``LayerCache`` of the layout's memories.
    """

    config_class: ClassVar[type[AttentionConfig]] = HybridHeadsConfig
    config: HybridHeadsConfig

    def _add_modules(self) -> None:
        self.mamba = Mamba2.from_config(self.embed_dim, self.config.mamba)

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
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``, as ``MultiHeadAttention`` and ``Mamba2`` say.

        Args:
            x: ``[B, T, E]``.
            context: None: a state belongs to one sequence.
            *more: Refused.
            mask: ``Causal()``, also ``& KeyLengths(n)`` without a cache.
            bias: Added to the scores.
            positions: ``[T]`` or ``[B, T]``; below 0 is padding.
            context_positions: None.
            cache: A ``LayerCache`` of the memories of this layout.
            kernel: ``"auto"``, or the name of a kernel of ``attention``.
            **unknown: Refused.

        Raises:
            ValueError: Shapes that do not fit, or no causal mask.
            UnsupportedError: A context, or a mask that a state cannot respect.
            TypeError: A cache of another kind.
        """
        if context is not None or context_positions is not None:
            raise UnsupportedError("a layer with a state takes no context: got a context")
        config = self.config
        (read, given), (mamba_read, mamba_given) = config.attention_scales, config.mamba_scales
        known: dict[str, Any] = {"mask": mask, "positions": positions}
        if cache is None:
            made = _scaled(self.mamba(_scaled(x, mamba_read), **known), mamba_given)
            x = _scaled(x, read)
            heads = super().forward(x, None, *more, bias=bias, kernel=kernel, **known, **unknown)
            return _scaled(heads, given) + made
        held = check_layer_cache(cache)
        if positions is None:
            positions = ragged_positions(held, x)
        with held.step(x, positions) as step:
            made = step.unpack(
                self.mamba._run(step.pack(_scaled(x, mamba_read)), step.real, "auto", step)
            )
            x, made = _scaled(x, read), _scaled(made, mamba_given)
            q, k, v = self._project(x, held.length if positions is None else positions)
            source = step.append("kv", k, v)
            heads = self._answered(x, q, source, mask, bias, positions, kernel)
        return _scaled(heads, given) + made


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


register_builder(HybridHeadsConfig, HybridHeads.from_config)
