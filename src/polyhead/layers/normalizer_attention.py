"""Attention by another function than the softmax: sigmoid, softpick, entmax, stick-breaking.

    out_i = Σ_j normalizer(scores_i)_j v_j

``semantics/normalizers`` has the formulas.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyhead.config import AttentionConfig, NormalizerAttentionConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder
from polyhead.semantics import (
    Entmax,
    Normalizer,
    Sigmoid,
    Softpick,
    StickBreaking,
    Window,
)
from polyhead.semantics.arguments import AttentionOptions

_BEHIND = ~Window(1)
"""Keys at positions behind the query's."""


class NormalizerAttention(MultiHeadAttention):
    """``MultiHeadAttention`` by the normalizer of its configuration; it has no parameter more."""

    config_class: ClassVar[type[AttentionConfig]] = NormalizerAttentionConfig
    config: NormalizerAttentionConfig

    def _add_modules(self) -> None:
        config = self.config
        made: dict[str, Normalizer] = {
            "sigmoid": Sigmoid(config.sigmoid_bias),
            "softpick": Softpick(),
            "entmax": Entmax(config.alpha),
            "stick_breaking": StickBreaking(),
        }
        self._normalizer = made[config.normalizer]

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        options["normalizer"] = self._normalizer
        if not self.config.own_key:
            mask = options.get("mask")
            options["mask"] = _BEHIND if mask is None else mask & _BEHIND
        return options


register_builder(NormalizerAttentionConfig, NormalizerAttention.from_config)
