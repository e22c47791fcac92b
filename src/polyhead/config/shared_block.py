"""A mixer that also reads what a block of attention and network makes, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.layout import EMBEDDED, EMBEDDING, NORMED_HALF, CallCost, HeadLayout, Prefill
from polyhead.config.memories import Memory
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError

_BLOCK = (
    *("block_norm", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("feed_forward_norm", "feed_forward"),
)
_OWN = ("mixer", "adapter_rank", "head_adapters", "block_of")


@dataclass(frozen=True)
class SharedBlockConfig(AttentionConfig, kind="shared_block"):
    """``AttentionConfig`` of a block before a mixer, which several layers may share.

    Zamba (Glorioso et al. 2024, arXiv 2405.16712) and Zamba 2 (arXiv 2411.15242).

    It norms what it reads by itself, so its layer has ``attention_norm=False`` and no network.

    Attributes:
        mixer: Of the layer alone, a layout with states: Mamba-2 or Mamba.
        network: Of the block, behind its attention.
        norm: Of what attention, network and mixer read.
        adapter_rank: Features of adapters beside the network's gate and values, which are the
            layer's own; None: there are none.
        head_adapters: Whether queries, keys and values have such adapters too.
        block_of: Number of the earlier layer whose block this one uses; None: its own.

    Raises:
        ConfigError: As ``AttentionConfig``, or parts that a block does not have.
    """

    mixer: HeadLayout = field(kw_only=True)
    network: FeedForwardConfig = field(kw_only=True)
    norm: NormConfig = field(default_factory=NormConfig, kw_only=True)
    adapter_rank: int | None = field(default=None, kw_only=True)
    head_adapters: bool = field(default=False, kw_only=True)
    block_of: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("adapter_rank", "block_of"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=int(name == "adapter_rank"))
        if self.mixer.kind not in ("mamba", "mamba2"):
            raise ConfigError(f"mixer must be Mamba or Mamba-2: got a {type(self.mixer).__name__}")
        if self.head_adapters and self.adapter_rank is None:
            raise ConfigError("head_adapters need an adapter_rank: got None")
        if self.qk_norm is not None or self.v_norm is not None or self.sinks:
            raise ConfigError("a shared block has no norms of heads and no sinks")
        network = self.network
        if not network.gated or network.dropout or network.out_scale != 1.0:
            raise ConfigError(
                "a shared block has a gated network, without dropout or a factor of its output: "
                f"got gated={network.gated}, dropout={network.dropout}, out_scale="
                f"{network.out_scale}"
            )
        if self.values_from_keys or self.hands_on_keys:
            raise ConfigError(
                "a shared block has a projection of values and keys for itself: got "
                f"values_from_keys={self.values_from_keys}, hands_on_keys={self.hands_on_keys}"
            )

    @property
    def input_vectors(self) -> int:
        return 2

    @property
    def layout(self) -> str:
        return f"{super().layout} in a shared block before {self.mixer.layout}"

    @property
    def described(self) -> str:
        block = "" if self.block_of is None else f" of layer {self.block_of}"
        return f"{super().described} in a shared block{block} before {self.mixer.described}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (*super().memories, *self.mixer.memories)

    @property
    def reads(self) -> Mapping[str, int]:
        return {EMBEDDED: EMBEDDING}

    @property
    def shared_weights(self) -> Mapping[str, int]:
        return {} if self.block_of is None else dict.fromkeys(_BLOCK, self.block_of)

    def check_source(self, what: str, source: HeadLayout) -> None:
        own: dict[str, Any] = {name: getattr(self, name) for name in _OWN}
        if not isinstance(source, SharedBlockConfig) or replace(source, **own) != self:
            raise ConfigError(
                f"block_of needs a layer with a block of the same sizes: layer {self.block_of} is "
                f"{source.described}"
            )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        E, rank = embed_dim, self.adapter_rank
        block = [*super().parameter_groups(E), *self.network.parameter_groups(E)]
        for vectors in (self.input_vectors, 1):
            size = self.norm.parameters(vectors * E)
            block.append(ParameterGroup("norms", 1, size, multiplied=False))
        for group in block:
            yield replace(group, held=self.block_of is None)
        yield from self.mixer.parameter_groups(E)
        yield ParameterGroup("norms", 1, self.norm.parameters(E), multiplied=False)
        yield ParameterGroup("attention", 1, E * E)
        if rank is not None:
            yield ParameterGroup("feed_forward", 1, rank * (E + 2 * self.network.hidden_dim))
        if rank is not None and self.head_adapters:
            for size in self.projected:
                read = self.input_vectors * E
                yield ParameterGroup("attention", 1, rank * (read + size))

    @property
    def projected(self) -> tuple[int, int, int]:
        """Features of queries, keys and values, of all heads."""
        kv = self.num_kv_heads
        return self.num_heads * self.head_dim, kv * self.head_dim, kv * self.value_dim

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        heads = super().call_cost(batch_size, queries, cached)
        state = self.mixer.call_cost(batch_size, queries, cached)
        return CallCost(heads.per_pair, per_token=state.per_token)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        E = embed_dim
        read, added = self.input_vectors * E, self.adapter_rank or 0
        attention = super().peak_activation_elements(E, call)
        if self.head_adapters:  # what adapters give is beside what they are added to
            attention += added + max(self.projected)
        network = self.network.peak_activation_elements(E, call.ranks)
        if self.adapter_rank is not None:
            network = max(network, added + 5 * self.network.hidden_dim)
        mixer = self.mixer.peak_activation_elements(E, call)
        normed = (1 + (NORMED_HALF if call.half else 1)) * read
        return max(normed, read + attention, 2 * E + network, 2 * E + mixer)
