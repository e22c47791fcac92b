"""Talking-heads attention: scores, weights or both are mixed over heads.

    weights_g = Σ_h after_gh softmax(Σ_f before_hf scores_f)

Shazeer et al. 2020, "Talking-Heads Attention", arXiv 2003.02436.

Shape letters: H query heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, TalkingHeadsAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder
from polyhead.semantics import TalkingHeads
from polyhead.semantics.arguments import AttentionOptions


class TalkingHeadsAttention(MultiHeadAttention):
    """``MultiHeadAttention`` whose heads are mixed.

    Attributes:
        before, after: ``[H, H]``, at first the identity; None where the configuration has none.
    """

    config_class: ClassVar[type[AttentionConfig]] = TalkingHeadsAttentionConfig
    config: TalkingHeadsAttentionConfig
    before: nn.Parameter | None
    after: nn.Parameter | None

    def _add_modules(self) -> None:
        H = self.num_heads
        for name in ("before", "after"):
            has = getattr(self.config, name)
            self.register_parameter(name, nn.Parameter(torch.eye(H)) if has else None)

    def reset_parameters(self) -> None:
        """Sets what mixes heads to the identity. Projections and norms stay."""
        super().reset_parameters()
        for mixing in (self.before, self.after):
            if mixing is not None:
                nn.init.eye_(mixing)

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        options["normalizer"] = TalkingHeads(self.before, self.after)
        return options


register_builder(TalkingHeadsAttentionConfig, TalkingHeadsAttention.from_config)
