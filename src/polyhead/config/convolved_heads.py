"""Heads beside as many convolutions whose weights depend on the text, as plain data (ConvBERT)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import Prefill, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ConvolvedHeadsConfig(AttentionConfig, kind="convolved_heads"):
    """``AttentionConfig`` of an encoder, with a convolution of the text's own beside each head.

    Attributes:
        width: Tokens that a convolution sees, as many on either side.
    """

    width: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("convolved heads width", self.width)
        check_plain(self, "convolved heads")
        if self.width % 2 == 0:
            raise ConfigError(f"convolved heads need an odd width: got {self.width}")
        plain = self.num_kv_heads == self.num_heads and self.value_dim == self.head_dim
        if not plain or self.window is not None:
            raise ConfigError(
                "convolved heads have keys and values each, as large as queries, and no window: "
                f"got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"v_head_dim={self.v_head_dim}, window={self.window}"
            )

    @property
    def layout(self) -> str:
        return f"convolved {super().layout}"

    @property
    def output_heads(self) -> int:
        return 2 * self.num_heads

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        E, H, W = embed_dim, self.num_heads, self.num_heads * self.head_dim
        projected = [(W, E, self.qkv_bias)] * 3  # queries, keys, values
        # What the convolutions' weights are made of, these weights, what is convolved.
        convolved = [(E, self.width, False), (W, E, True), (H * self.width, W, True), (W, E, True)]
        for size, features, bias in (*projected, *convolved, (E, 2 * W, self.out_bias)):
            yield ParameterGroup("attention", 1, size * features)
            if bias:
                yield ParameterGroup("attention", 1, size, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, D = shared(self.num_heads, call.ranks), self.head_dim
        # The input without padding, convolved; weights; what is convolved, for each of them.
        return plain + 2 * embed_dim + 2 * H * self.width + (self.width + 3) * H * D
