"""Mamba-2 as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead._utils.checks import check_number
from polyhead.config.data import check_choice, check_whole
from polyhead.config.layout import CallCost, HeadLayout, Prefill, shared
from polyhead.config.memories import Memory, State, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Mamba2Config(HeadLayout, kind="mamba2"):
    """One Mamba-2 layer (Dao & Gu 2024, arXiv 2405.21060); ``num_heads`` is H, the states.

    Attributes:
        num_groups: G, heads of B and C (keys and queries), a divisor of H; the norm goes over the
            values of a group.
        state_dim: K, features of B and C.
        head_dim: V, features of a value.
        conv_kernel: Tokens that the convolution sees, the current one included; at least 2.
        conv_bias: A bias on the convolution.
        bias: A bias on the projection into the layer, and on that out of it
        out_bias: unless this says otherwise.
        norm_place: Where the RMSNorm stands: ``"after"`` the gate or ``"before"`` it; None: there
            is none (Falcon-H1).
        norm_eps: Of that norm.
        in_scales: Factors of gates, values, B, C and steps as projected; empty: none.
        dt_min, dt_max: Limits of the steps; dt_max None: no upper one.

    Raises:
        ConfigError: Sizes that do not go together, or what a state has no use for.
    """

    num_groups: int
    state_dim: int
    head_dim: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    norm_place: Literal["after", "before"] | None = "after"
    norm_eps: float = 1e-5
    in_scales: tuple[float, ...] = ()
    dt_min: float = 0.0
    dt_max: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_groups", "state_dim", "head_dim"):
            check_whole(name, getattr(self, name))
        check_whole("conv_kernel", self.conv_kernel, least=2)
        check_choice("norm_place", self.norm_place, ("after", "before", None))
        if len(self.in_scales) not in (0, 5):
            raise ConfigError(
                "in_scales must be 5 factors, of gates, values, B, C and steps, or none: got "
                f"{list(self.in_scales)}"
            )
        check_number("dt_min", self.dt_min, least=0.0, error=ConfigError)
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"num_groups must divide num_heads: got num_heads={self.num_heads}, "
                f"num_groups={self.num_groups}"
            )
        if self.dt_max is not None and self.dt_max < self.dt_min:
            raise ConfigError(f"dt_max must be at least dt_min={self.dt_min}: got {self.dt_max}")
        if self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "Mamba-2 has no rotary positions, no scale and no weights to drop: got "
                f"rope={self.rope}, scale={self.scale}, dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "Mamba-2"

    @property
    def described(self) -> str:
        return f"{self.layout} {self.num_heads} states of {self.state_dim} × {self.head_dim}"

    @property
    def has_out_bias(self) -> bool:
        """Whether the projection out of the layer has a bias."""
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def channels(self) -> int:
        """What the convolution goes over: all values, B and C."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim

    @property
    def in_features(self) -> int:
        """Rows of the projection: gates, the convolution's channels, steps."""
        return self.num_heads * self.head_dim + self.channels + self.num_heads

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            Tail("conv", self.channels, self.conv_kernel - 1),
            State("state", (self.num_heads, self.state_dim, self.head_dim)),
        )

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_head_dim(self) -> int:
        return self.state_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, width = embed_dim, self.num_heads * self.head_dim
        yield ParameterGroup("attention", 1, (self.in_features + width) * E)
        yield ParameterGroup("attention", 1, self.channels * self.conv_kernel, as_numbers=True)
        added = self.channels * self.conv_bias + 3 * self.num_heads
        added += self.in_features * self.bias + E * self.has_out_bias
        yield ParameterGroup("attention", 1, added, multiplied=False)
        if self.norm_place is not None:
            yield ParameterGroup("norms", 1, width, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        # A token writes the state and reads it.
        return CallCost(0, per_token=2 * self.num_heads * self.state_dim * self.head_dim)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # The projection and the convolution's input beside its tail, its output and that activated;
        # or values, outputs of heads and their gated norm. All but the first are in float32.
        values, twice = shared(self.num_heads, call.ranks) * self.head_dim, 2 if call.half else 1
        made = max((1 + 2 * twice) * self.channels, self.channels + 5 * twice * values)
        return self.in_features + made + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> Mamba2Config:
        return self
