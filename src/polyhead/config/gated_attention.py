"""Attention whose heads' outputs are gated, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_choice
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig, kind="gated"):
    """``AttentionConfig`` with a gate.

    Attributes:
        gate: The function of the gate.
        gate_per: Every ``"feature"`` of a head's output has a gate of its own (Qwen3-Next), or a
            ``"head"`` has one for all (Step 3.5, Laguna).
        gate_bias: Whether the gate's projection has a bias; None: as those of q, k and v;
            ``"head"``: a number for each head, which all of its gates add (Beam).
    """

    gate: Literal["sigmoid", "softplus"] = "sigmoid"
    gate_per: Literal["feature", "head"] = "feature"
    gate_bias: bool | Literal["head"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gate", self.gate, ("sigmoid", "softplus"))
        check_choice("gate_per", self.gate_per, ("feature", "head"))
        check_choice("gate_bias", self.gate_bias, (True, False, None, "head"))

    @property
    def has_gate_bias(self) -> bool:
        """Whether the gate's projection has a bias."""
        return self.qkv_bias if self.gate_bias is None else self.gate_bias is True

    @property
    def gate_dim(self) -> int:
        """Gates of a head."""
        return self.value_dim if self.gate_per == "feature" else 1

    @property
    def layout(self) -> str:
        return f"gated {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, self.gate_dim * embed_dim)
        if self.has_gate_bias:
            yield ParameterGroup("attention", self.num_heads, self.gate_dim, multiplied=False)
        if self.gate_bias == "head":
            yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        # Beside q, k and v the heads' outputs, the gate, and its source or what it makes of them.
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        return max(plain, made + 3 * H * self.value_dim)
