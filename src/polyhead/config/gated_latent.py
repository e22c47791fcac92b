"""Latent attention whose heads' outputs are gated, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.latent import LatentAttentionConfig
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class GatedLatentAttentionConfig(LatentAttentionConfig, kind="gated_latent"):
    """``LatentAttentionConfig`` with a gate for each head, a sigmoid of the layer's input."""

    @property
    def layout(self) -> str:
        return f"gated {super().layout}"

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        yield ParameterGroup("attention", self.num_heads, embed_dim)
