"""New weights for a model, as its configuration says."""

from __future__ import annotations

import math

from torch import Tensor, nn

from polyhead.config import TransformerConfig
from polyhead.layers.positions import LearnedPositions
from polyhead.models.heads import Head

_OUT = ("o_proj", "down_proj")
"""Matrices that write to the residual stream."""


def draw_weights(model: nn.Module, config: TransformerConfig) -> None:
    """Draws all weights of a ``Transformer`` of this configuration; see ``InitialConfig``."""
    rule, scale = config.initial.rule, config.initial.scale
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | Head):
            weight = module.weight
            if isinstance(weight, Tensor):
                std = scale
                if rule == "residual" and name.endswith(_OUT):
                    std /= math.sqrt(2 * max(len(config.layers), 1))
                elif rule == "width" and isinstance(module, nn.Linear):
                    std /= math.sqrt(module.in_features)
                    if name.endswith("attention.q_proj"):
                        attention = model.get_submodule(name.rpartition(".")[0])
                        std /= math.sqrt(float(getattr(attention, "head_dim", 1)))
                nn.init.normal_(weight, std=std)
            if isinstance(beside := getattr(module, "beside", None), Tensor):
                nn.init.normal_(beside, std=scale)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
        elif isinstance(module, LearnedPositions):
            nn.init.normal_(module.weight, std=scale)
        elif hasattr(module, "reset_parameters") and module is not model:
            module.reset_parameters()
    if rule == "width":
        for name in ("relative_bias", "encoder_relative_bias"):
            if (tables := getattr(model, name, None)) is not None:
                for table in tables.parameters():
                    nn.init.normal_(table, std=scale / math.sqrt(config.embed_dim))
