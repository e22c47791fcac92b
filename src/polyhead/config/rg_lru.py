"""A real-gated linear recurrent unit (RG-LRU) as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.data import check_choice, check_whole
from polyhead.config.feed_forward import ACTIVATIONS, Activation
from polyhead.config.layout import CallCost, HeadLayout, Prefill
from polyhead.config.memories import Memory, State, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class RgLruConfig(HeadLayout, kind="rg_lru"):
    """Griffin's recurrent layer (De et al. 2024, arXiv 2402.19427); ``num_heads`` is H, the blocks.

    Each of W channels has a state of one number; its two gates read the channels of its block.

    Attributes:
        width: Channels W, which H divides.
        conv_kernel: Tokens that the convolution sees, the current one included; at least 2.
        activation: Of the branch that multiplies what the states give.

    Raises:
        ConfigError: Sizes that do not go together, or what a state has no use for.
    """

    width: int = field(kw_only=True)
    conv_kernel: int = 4
    activation: Activation = "gelu_tanh"

    def __post_init__(self) -> None:
        check_whole("num_heads", self.num_heads)
        check_whole("width", self.width)
        check_whole("conv_kernel", self.conv_kernel, least=2)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.width % self.num_heads:
            raise ConfigError(
                f"num_heads must divide width: got num_heads={self.num_heads}, width={self.width}"
            )
        if self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "RG-LRU has no rotary positions, no scale and no weights to drop: got "
                f"rope={self.rope}, scale={self.scale}, dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "RG-LRU"

    @property
    def described(self) -> str:
        return f"{self.layout} {self.width} channels in {self.num_heads} blocks"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            Tail("conv", self.width, self.conv_kernel - 1),
            State("state", (self.width, 1, 1)),
        )

    @property
    def value_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def rope_head_dim(self) -> int:
        return self.value_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        W = self.width
        yield ParameterGroup("attention", 1, 3 * W * embed_dim)
        gates = 2 * W * self.value_dim
        yield ParameterGroup("attention", 1, gates + W * self.conv_kernel, as_numbers=True)
        # Biases of the projections, the convolution and the gates; what the decays are made of.
        yield ParameterGroup("attention", 1, 6 * W + embed_dim, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        # A token writes the states and reads them.
        return CallCost(0, per_token=2 * self.width)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # The branch, its input and the convolution's, and in float32 gates, decays, their factor,
        # values and outputs.
        return (3 + 7 * (2 if call.half else 1)) * self.width + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> RgLruConfig:
        return self
