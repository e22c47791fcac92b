"""Gated DeltaNet as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from polyhead.config.attention import greatest_divisor
from polyhead.config.data import check_choice, check_positive, check_whole
from polyhead.config.layout import CallCost, HeadLayout, Prefill, shared
from polyhead.config.memories import Memory, State, Tail
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class GatedDeltaNetConfig(HeadLayout, kind="gated_delta"):
    """One gated DeltaNet layer; ``num_heads`` is H, the number of states and of value heads.

    Attributes:
        num_key_heads: G, heads of queries and of keys, a divisor of H.
        head_k_dim: Features K of a query and of a key.
        head_v_dim: Features V of a value.
        conv_kernel: Tokens that the convolution sees, the current one included; at least 2.
        norm_eps: Of the RMSNorm over a head's output.
        allow_neg_eigval: Whether β reaches from 0 to 2, not 1: a state may then change its sign
            along a key (Grazzi et al. 2024, arXiv 2411.12537).
        gate: The function of the gates of heads' outputs.

    Raises:
        ConfigError: Sizes that do not go together, or what a state has no use for.
    """

    num_key_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    norm_eps: float = 1e-6
    allow_neg_eigval: bool = False
    gate: Literal["silu", "sigmoid"] = field(default="silu", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("gate", self.gate, ("silu", "sigmoid"))
        for name in ("num_heads", "num_key_heads", "head_k_dim", "head_v_dim"):
            check_whole(name, getattr(self, name))
        check_whole("conv_kernel", self.conv_kernel, least=2)
        if self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"num_key_heads must divide num_heads: got num_heads={self.num_heads}, "
                f"num_key_heads={self.num_key_heads}"
            )
        if self.rope is not None or self.dropout:
            raise ConfigError(
                "gated DeltaNet has no rotary positions and no weights to drop: got "
                f"rope={self.rope}, dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "gated DeltaNet"

    @property
    def described(self) -> str:
        return f"{self.layout} {self.num_heads} states of {self.head_k_dim} × {self.head_v_dim}"

    @property
    def channels(self) -> int:
        """C, what the convolution goes over: all queries, keys and values."""
        return 2 * self.num_key_heads * self.head_k_dim + self.num_heads * self.head_v_dim

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            Tail("conv", self.channels, self.conv_kernel - 1),
            State("state", (self.num_heads, self.head_k_dim, self.head_v_dim)),
        )

    @property
    def value_dim(self) -> int:
        return self.head_v_dim

    @property
    def rope_head_dim(self) -> int:
        return self.head_k_dim

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, H, G, K, V = (
            embed_dim, self.num_heads, self.num_key_heads, self.head_k_dim, self.head_v_dim,
        )  # fmt: skip
        for _ in "qk":
            yield ParameterGroup("attention", G, K * E)
        for size in (V, V, 1, 1, V):  # values, gates, β, decays, output
            yield ParameterGroup("attention", H, size * E)
        yield ParameterGroup("attention", 1, self.channels * self.conv_kernel, as_numbers=True)
        yield ParameterGroup("attention", H, 2, multiplied=False)
        yield ParameterGroup("norms", 1, V, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        # A token reads the state by its key, writes it, and reads it by its query.
        return CallCost(0, per_token=3 * self.num_heads * self.head_k_dim * self.head_v_dim)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        V, C = shared(self.num_heads, call.ranks) * self.head_v_dim, self.channels
        # The convolution's inputs, those beside its tail, its output and that activated, in
        # float32; or queries and keys of length 1, gates, outputs and their norm.
        convolved = (7 if call.half else 4) * C
        return max(convolved, 2 * C + 8 * V) + 2 * V + embed_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> GatedDeltaNetConfig:
        return replace(self, num_key_heads=greatest_divisor(self.num_heads, num_kv_heads))


@dataclass(frozen=True)
class KimiDeltaAttentionConfig(GatedDeltaNetConfig, kind="kimi_delta"):
    """``GatedDeltaNetConfig`` with a decay for each feature of a key (Kimi Linear, 2025).

    Attributes:
        gate_rank: Features through which decays and gates are made; None: ``head_v_dim``.
        low_rank: False: they are made straight from the input (Ling 3.0).
        decay_bound: b of a decay −b · sigmoid(exp(A) · raw), which is at least −b; None: it has no
            bound, −exp(A) · softplus(raw).

    Raises:
        ConfigError: Sizes that do not go together.
    """

    gate_rank: int | None = None
    low_rank: bool = True
    decay_bound: float | None = None
    gate: Literal["silu", "sigmoid"] = field(default="sigmoid", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_rank is not None:
            check_whole("gate_rank", self.gate_rank)
            if not self.low_rank:
                raise ConfigError(f"gate_rank needs low_rank: got gate_rank={self.gate_rank}")
        if self.decay_bound is not None:
            check_positive("decay_bound", self.decay_bound)
        if self.num_key_heads != self.num_heads:
            raise ConfigError(
                "Kimi delta attention has a key for each state: got num_key_heads="
                f"{self.num_key_heads}, num_heads={self.num_heads}"
            )

    @property
    def layout(self) -> str:
        return "Kimi delta attention"

    @property
    def rank(self) -> int:
        """Features through which decays and gates are made."""
        return self.head_v_dim if self.gate_rank is None else self.gate_rank

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, H, K, V, R = embed_dim, self.num_heads, self.head_k_dim, self.head_v_dim, self.rank
        into = R if self.low_rank else E
        for size in (
            K * E,
            K * E,
            V * E,
            E,
            V * E,
            K * into,
            V * into,
        ):  # q, k, v, β, output, decay, gate
            yield ParameterGroup("attention", H, size)
        if self.low_rank:
            yield ParameterGroup("attention", 1, 2 * R * E)
        yield ParameterGroup("attention", 1, self.channels * self.conv_kernel, as_numbers=True)
        yield ParameterGroup("attention", H, 1 + K, multiplied=False)
        yield ParameterGroup("norms", 1, V, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        dense = super().peak_activation_elements(embed_dim, call)
        # Decays, and what they are made of, in float32.
        return dense + (4 if call.half else 2) * self.num_heads * self.head_k_dim

    def with_num_kv_heads(self, num_kv_heads: int) -> KimiDeltaAttentionConfig:
        return self
