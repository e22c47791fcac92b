"""Mamba, the first version, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.data import check_whole
from polyhead.config.grouped import check_divisor
from polyhead.config.layout import CallCost, HeadLayout, Prefill
from polyhead.config.memories import Memory, State, Tail
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class MambaConfig(HeadLayout, kind="mamba"):
    """One Mamba layer (Gu & Dao 2023, arXiv 2312.00752); ``num_heads`` is W, the channels.

    Each channel has a state of its own, of one value: a head whose keys are shared by all.

    Attributes:
        state_dim: N, features of B and C.
        step_rank: R, features through which the steps of all channels are made.
        conv_kernel: Tokens that the convolution sees, the current one included; at least 2.
        conv_bias: A bias on the convolution.
        bias: Biases on the projections into the layer and out of it.
        norm: Over the R features, over B and over C (Jamba, Falcon-Mamba); None: none.
        num_groups: G, a divisor of W: the channels of a group have R features, B and C of their
            own, made from that group alone (Zamba).

    Raises:
        ConfigError: Sizes that do not go together, or what a state has no use for.
    """

    state_dim: int
    step_rank: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: NormConfig | None = None
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_heads", "state_dim", "step_rank"):
            check_whole(name, getattr(self, name))
        check_divisor("num_groups", self.num_groups, self.num_heads)
        check_whole("conv_kernel", self.conv_kernel, least=2)
        if self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "Mamba has no rotary positions, no scale and no weights to drop: got "
                f"rope={self.rope}, scale={self.scale}, dropout={self.dropout}"
            )
        if self.norm is not None and self.num_groups > 1:
            raise ConfigError(f"Mamba has no norms beside groups: got num_groups={self.num_groups}")

    @property
    def layout(self) -> str:
        return "Mamba"

    @property
    def described(self) -> str:
        return f"{self.layout} {self.num_heads} channels with states of {self.state_dim}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            Tail("conv", self.num_heads, self.conv_kernel - 1),
            State("state", (self.num_heads, self.state_dim, 1)),
        )

    @property
    def value_dim(self) -> int:
        return 1

    @property
    def rope_head_dim(self) -> int:
        return self.state_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, W, N, R = embed_dim, self.num_heads, self.state_dim, self.step_rank
        yield ParameterGroup("attention", 1, 3 * W * E)
        read = (2 * R + 2 * N) * W  # as many for any number of groups
        yield ParameterGroup("attention", 1, read, as_numbers=self.num_groups > 1)
        yield ParameterGroup("attention", 1, W * self.conv_kernel, as_numbers=True)
        added = W * self.conv_bias + (2 * W + E) * self.bias + 2 * W
        yield ParameterGroup("attention", 1, added + W * N, multiplied=False)
        if self.norm is not None:
            norms = sum(map(self.norm.parameters, (R, N, N)))
            yield ParameterGroup("norms", 1, norms, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        # A token writes the states and reads them.
        return CallCost(0, per_token=2 * self.num_heads * self.state_dim)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # The projection, the convolution's output, and beside them, in float32, steps and outputs,
        # and a decay of every number of the states; without native code also B and C for each.
        twice = 2 if call.half else 1
        return (3 + 4 * twice + 3 * twice * self.state_dim) * self.num_heads + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> MambaConfig:
        return self
