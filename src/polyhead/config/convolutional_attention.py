"""Attention whose queries and keys are convolved along time, as plain data (ZAYA1's CCA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.memories import Memory, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ConvolutionalAttentionConfig(AttentionConfig, kind="convolutional"):
    """``AttentionConfig`` with convolved queries and keys (CCA: compressed convolutional attention,
    Figliolia et al. 2025, arXiv 2510.04476). The first half of all values' features is made of a
    token itself, the last half of the token before. The layer is causal.

    Attributes:
        depthwise_kernel: Tokens that the first convolution sees, of each feature by itself.
        head_kernel: Tokens that the second one sees, of all features of a head.

    Raises:
        ConfigError: As ``AttentionConfig``, kernels that see no earlier token, or values that have
            no halves or no projection.
    """

    depthwise_kernel: int = 2
    head_kernel: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depthwise_kernel", "head_kernel"):
            check_whole(name, getattr(self, name))
        if not self.earlier_tokens:
            raise ConfigError(
                "depthwise_kernel or head_kernel must be at least 2, to see an earlier token: got "
                "1 and 1"
            )
        if self.values_from_keys or self.num_kv_heads * self.value_dim % 2:
            raise ConfigError(
                "values of two tokens need a projection of their own, and an even number of "
                f"features: got values_from_keys={self.values_from_keys}, num_kv_heads="
                f"{self.num_kv_heads} × {self.value_dim}"
            )

    @property
    def convolved(self) -> int:
        """Features of all queries and keys of a token."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def earlier_tokens(self) -> int:
        """Tokens before a token that both convolutions together see."""
        return self.depthwise_kernel + self.head_kernel - 2

    @property
    def layout(self) -> str:
        return f"CCA {super().layout}"

    @property
    def described(self) -> str:
        return f"{super().described}, convolved over {self.earlier_tokens + 1} tokens"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            *super().memories,
            Tail("convolved", self.convolved, self.earlier_tokens),
            Tail("delayed", self.num_kv_heads * self.value_dim // 2, 1),
        )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        heads, D = self.num_heads + self.num_kv_heads, self.head_dim
        kernels = D * self.depthwise_kernel + D * D * self.head_kernel
        yield ParameterGroup("attention", heads, kernels, as_numbers=True)
        yield ParameterGroup("attention", heads, 2 * D, multiplied=False)  # biases
        yield ParameterGroup("attention", self.num_kv_heads, 1, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        QK, V = (H + G) * self.head_dim, G * self.value_dim
        # Beside projections: behind earlier ones, in float32, convolved without a bias and with
        # one, and rounded; or these, all tokens that the second one sees, and what it makes.
        convolved = max(8 if call.half else 4, 2 + self.head_kernel)
        return max(plain, V + (1 + convolved) * QK)
