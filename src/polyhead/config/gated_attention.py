"""Attention whose heads' outputs are gated, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import shared
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig, kind="gated"):
    """``AttentionConfig`` with a gate, by default with biases where q, k and v have them."""

    gate_bias: bool | None = None  # None: qkv_bias (AFMoE's gate has none)

    @property
    def has_gate_bias(self) -> bool:
        """Whether the gate's projection has a bias."""
        return self.qkv_bias if self.gate_bias is None else self.gate_bias

    @property
    def layout(self) -> str:
        return f"gated {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, self.value_dim * embed_dim)
        if self.has_gate_bias:
            yield ParameterGroup("attention", self.num_heads, self.value_dim, multiplied=False)

    def peak_activation_elements(
        self, embed_dim: int, *, tokens: int, batch_size: int, ranks: int, half: bool
    ) -> int:
        given = {"tokens": tokens, "batch_size": batch_size, "ranks": ranks}
        plain = super().peak_activation_elements(embed_dim, half=half, **given)
        # Beside q, k and v the heads' outputs, the gate, and its source or what it makes of them.
        H, G = shared(self.num_heads, ranks), shared(self.num_kv_heads, ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        return max(plain, made + 3 * H * self.value_dim)
