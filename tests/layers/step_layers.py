"""Layers and tokens that the tests of native steps draw."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.config import LayerConfig
from polyhead.layers.transformer_layer import TransformerLayer

E = 48


def drawn_layer(config: LayerConfig, dtype: torch.dtype = torch.float32) -> TransformerLayer:
    """A layer none of whose numbers are those it is made with."""
    torch.manual_seed(0)
    layer = TransformerLayer.from_config(E, config).to(dtype).eval()
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return layer


def drawn_tokens(batch: int, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[batch, count, E]``."""
    return torch.randn(batch, count, E, generator=torch.Generator().manual_seed(seed)).to(dtype)
