"""New weights for a model, as its configuration says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from polyhead.layers.positions import LearnedPositions
from polyhead.models.heads import Head

if TYPE_CHECKING:
    from polyhead.models.transformer import Transformer

_OUT = ("o_proj", "down_proj")
"""Matrices that write to the residual stream."""


def draw_weights(model: Transformer) -> None:
    """Draws all weights of a model anew; see ``InitialConfig``."""
    rule, scale = model.config.initial.rule, model.config.initial.scale
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | Head):
            weight = module.weight
            if isinstance(weight, Tensor):
                std = scale
                if rule == "residual" and name.endswith(_OUT):
                    std /= math.sqrt(2 * max(len(model.layers), 1))
                elif rule == "width" and isinstance(module, nn.Linear):
                    std /= math.sqrt(module.in_features)
                    if name.endswith("attention.q_proj"):
                        attention = model.get_submodule(name.rpartition(".")[0])
                        std /= math.sqrt(float(getattr(attention, "head_dim", 1)))
                nn.init.normal_(weight, std=std)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
        elif isinstance(module, LearnedPositions):
            nn.init.normal_(module.weight, std=scale)
        elif hasattr(module, "reset_parameters") and module is not model:
            module.reset_parameters()
    if rule == "width":
        for tables in (model.relative_bias, model.encoder_relative_bias):
            if tables is not None:
                for table in tables.parameters():
                    nn.init.normal_(table, std=scale / math.sqrt(model.config.embed_dim))
