"""Heads whose values are mixed with those of an earlier layer, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import HeadLayout, Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError

VALUES = "values"
"""The values of a call's tokens, ``[B, G, T, V]``, which later layers may read."""


@dataclass(frozen=True)
class ValueResidualAttentionConfig(AttentionConfig, kind="value_residual"):
    """``AttentionConfig`` that hands its values on, or mixes its own with such.

    Attributes:
        values_of: Number of the earlier layer whose values it mixes with its own, as many kv heads
            of the same size; None: it hands its own on.
    """

    values_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values_of is not None:
            check_whole("values_of", self.values_of, least=0)

    @property
    def layout(self) -> str:
        return f"value-residual {super().layout}"

    @property
    def hands_on(self) -> frozenset[str]:
        return super().hands_on | ({VALUES} if self.values_of is None else set())

    @property
    def reads(self) -> Mapping[str, int]:
        return {} if self.values_of is None else {VALUES: self.values_of}

    @property
    def handed_elements(self) -> int:
        held = self.num_kv_heads * self.value_dim if self.values_of is None else 0
        return super().handed_elements + held

    def check_source(self, what: str, source: HeadLayout) -> None:
        held = source.kv
        if (held.num_kv_heads, held.value_dim) != (self.num_kv_heads, self.value_dim):
            raise ConfigError(
                f"values_of needs a layer with {self.num_kv_heads} kv heads and values of "
                f"{self.value_dim} features: layer {self.values_of} has {held}"
            )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        if self.values_of is not None:
            yield ParameterGroup("attention", 1, 2, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        # Both values times their factors, and the sum.
        return max(plain, (H + G) * self.head_dim + 4 * G * self.value_dim)
