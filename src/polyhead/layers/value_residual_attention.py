"""Value residual learning: values are mixed with those of the first layer.

    head_h = Attention(x Wq_h, x Wk_g, λ1 · V_g + λ2 · x Wv_g)

V are the values that layer ``values_of`` made of the same tokens, in most models the first layer.
Zhou et al. 2024, "Value Residual Learning", arXiv 2410.17897 (ResFormer), with λ1 and λ2 learned.
Caches hold the mixed values, so a decoding step reads nothing more.

Shape letters: B batch, H query heads, G kv heads, T tokens, V value size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, ValueResidualAttentionConfig
from polyhead.config.value_residual import VALUES
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.registry import register_builder


class ValueResidualAttention(MultiHeadAttention):
    """``MultiHeadAttention`` on mixed values, for self-attention; built from its config.

    With ``values_of`` it is called within its model.

    Attributes:
        mix: ``[2]`` λ1 and λ2, at first 0.5; absent without ``values_of``.
    """

    config_class: ClassVar[type[AttentionConfig]] = ValueResidualAttentionConfig
    config: ValueResidualAttentionConfig

    def _add_modules(self) -> None:
        if self.config.values_of is not None:
            self.mix = nn.Parameter(torch.full((2,), 0.5))

    def reset_parameters(self) -> None:
        """Sets λ1 and λ2 to 0.5. Projections stay."""
        super().reset_parameters()
        if self.config.values_of is not None:
            nn.init.constant_(self.mix, 0.5)

    def _with_handed(self, v: Tensor, handed: Handed | None) -> Tensor:
        if self.config.values_of is not None:
            given: Tensor = handed_to(handed, VALUES, self.config.reads)
            return self.mix[0] * given + self.mix[1] * v
        if handed is not None:
            handed.hand_on(VALUES, v)
        return v

    def _cross_attention(self, *_: Any) -> NoReturn:
        raise ValueError("value-residual attention is self-attention: got a context")


register_builder(ValueResidualAttentionConfig, ValueResidualAttention.from_config)
