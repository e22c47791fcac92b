"""A gated short convolution as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.data import check_whole
from polyhead.config.layout import CallCost, HeadLayout, Prefill
from polyhead.config.memories import Memory, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class ShortConvolutionConfig(HeadLayout, kind="short_convolution"):
    """A gated convolution over the last few tokens, in place of attention (LFM2).

    Attributes:
        width: Channels, as many as features of the layer's input.
        conv_kernel: Tokens that the convolution sees, the current one included; at least 2.
        bias: Biases on the projections and the convolution.

    Raises:
        ConfigError: Sizes that do not go together, or what a convolution has no use for.
    """

    num_heads: int = 1
    width: int = field(kw_only=True)
    conv_kernel: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_whole("width", self.width)
        check_whole("conv_kernel", self.conv_kernel, least=2)
        if self.num_heads != 1 or self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "a short convolution has one head and no rope, scale and dropout: got "
                f"num_heads={self.num_heads}, rope={self.rope}, scale={self.scale}, "
                f"dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "short convolution"

    @property
    def described(self) -> str:
        return f"{self.layout} of {self.conv_kernel} tokens"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (Tail("conv", self.width, self.conv_kernel - 1),)

    @property
    def value_dim(self) -> int:
        return self.width

    @property
    def rope_head_dim(self) -> int:
        return self.width

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        W = self.width
        yield ParameterGroup("attention", 1, 4 * W * embed_dim)
        yield ParameterGroup("attention", 1, W * self.conv_kernel, as_numbers=True)
        if self.bias:
            yield ParameterGroup("attention", 1, 4 * W + embed_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        return CallCost(0)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # The three projections, their product, that beside its tail, the convolution's output; and
        # the last two in float32.
        return (9 if call.half else 6) * self.width + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> ShortConvolutionConfig:
        return self
