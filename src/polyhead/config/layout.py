"""A head layout: the interface by which every kind of attention describes itself.

Caches, planner, layers and tools use these methods and never test for a class. A new layout is one
file in ``layers``: a subclass of ``HeadLayout``, the module that it builds, and its name in
``HeadLayout.where``.

Letters: B batch, T queries, E embed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from polyhead.config.data import OneOfSeveral
from polyhead.config.memories import Memory, PerToken
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.rope import RopeConfig
from polyhead.errors import ConfigError

if TYPE_CHECKING:
    from polyhead.config.attention import AttentionConfig

EMBEDDING = -1
"""The number under which the embedding hands on, and what a call is given beside tokens."""

TOKENS = "tokens"
"""The ids of a call, ``[B, T]``, which networks may read from the embedding."""

EMBEDDED = "embedded"
"""What the embedding gives, ``[B, T, E]``, which every layer of a model may read."""

SEGMENTS = "segments"
"""What a call hands to layers that score whether two tokens are of one segment, ``[B, T]``."""

GLOBAL_TOKENS = "global_tokens"
"""What a call of an encoder may name, ``[B, T]`` bool; None is handed on where it does not."""


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys a query sees, by their distance; None: no limit.

    Attributes:
        window: Keys behind a query, itself included.
        ahead: Keys ahead of it.
        chunk: Positions are cut into runs of so many, and a query sees its own run.
        chosen: Keys that a query chooses at most of those that it would see.
    """

    window: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    chosen: int | None = None


@dataclass(frozen=True)
class CallCost:
    """Operations of a call besides its projections.

    Attributes:
        per_pair: Multiply-adds of a query with a key that it sees and with its value, all heads.
        remade: Operations of making keys and values of cached tokens once more, all batch rows.
        per_token: Multiply-adds of a token with states, all heads.
        per_choice: Multiply-adds of a query with a key from which it may choose.
    """

    per_pair: int
    remade: int = 0
    per_token: int = 0
    per_choice: int = 0


class Prefill(NamedTuple):
    """A call without gradients and without a cache, of which activations are counted.

    Attributes:
        tokens: Number of tokens T.
        batch_size: Batch size B.
        ranks: That share the heads.
        half: Whether numbers have 16 bits: without native code, norms then go through float32.
    """

    tokens: int
    batch_size: int
    ranks: int
    half: bool


@dataclass(frozen=True)
class HeadLayout(OneOfSeveral, ABC):
    """Self-attention as plain data, of any kind.

    Attributes:
        num_heads: Number of query heads H.
        rope: Rotary positions of queries and keys.
        scale: Factor of the scores; None: the layout's own.
        dropout: Dropout probability of the attention weights, when training.
    """

    where: ClassVar[Mapping[str, str]] = {
        "heads": "polyhead.config.attention",
        "latent": "polyhead.config.latent",
        "sparse_latent": "polyhead.config.sparse_latent",
        "funnel": "polyhead.config.funnel",
        "gated": "polyhead.config.gated_attention",
        "selective": "polyhead.config.selective_attention",
        "compressed": "polyhead.config.compressed",
        "lsh": "polyhead.config.lsh",
        "native_sparse": "polyhead.config.native_sparse",
        "sub_norm": "polyhead.config.sub_norm",
        "differential": "polyhead.config.differential_attention",
        "gated_delta": "polyhead.config.gated_delta_net",
        "kimi_delta": "polyhead.config.gated_delta_net",
        "lightning": "polyhead.config.lightning_attention",
        "mamba": "polyhead.config.mamba",
        "mamba2": "polyhead.config.mamba2",
        "short_convolution": "polyhead.config.short_convolution",
        "cross_layer": "polyhead.config.cross_layer",
        "rg_lru": "polyhead.config.rg_lru",
        "hybrid_heads": "polyhead.config.hybrid_heads",
        "exclusive": "polyhead.config.exclusive_attention",
        "expert_heads": "polyhead.config.expert_heads",
        "gated_latent": "polyhead.config.gated_latent",
        "factorized": "polyhead.config.factorized",
        "global_window": "polyhead.config.global_window",
        "global_blocks": "polyhead.config.global_blocks",
        "global_prefix": "polyhead.config.global_prefix",
        "grouped": "polyhead.config.grouped",
        "grouped_tied": "polyhead.config.grouped_tied",
        "block_sums": "polyhead.config.block_sums",
        "bottleneck": "polyhead.config.bottleneck",
        "convolutional": "polyhead.config.convolutional_attention",
        "convolved_heads": "polyhead.config.convolved_heads",
        "disentangled": "polyhead.config.disentangled",
        "dynamic_mask": "polyhead.config.dynamic_mask",
        "distance_profiles": "polyhead.config.distance_profiles",
        "engram": "polyhead.config.engram",
        "gated_selective": "polyhead.config.gated_selective",
        "merged": "polyhead.config.merged_attention",
        "forgetting": "polyhead.config.forgetting",
        "off_by_one": "polyhead.config.off_by_one",
        "normalizer": "polyhead.config.normalizer_attention",
        "cope": "polyhead.config.contextual_positions",
        "talking_heads": "polyhead.config.talking_heads",
        "multi_token": "polyhead.config.multi_token",
        "relative": "polyhead.config.relative_attention",
        "scalable_softmax": "polyhead.config.scalable_softmax",
        "shared_block": "polyhead.config.shared_block",
        "tensor_product": "polyhead.config.tensor_product",
        "value_residual": "polyhead.config.value_residual",
    }

    num_heads: int
    rope: RopeConfig | None = field(default=None, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)

    @property
    @abstractmethod
    def layout(self) -> str:
        """A short name: ``"MHA"``, ``"GQA-8"``, ``"MQA"``, ``"MLA"``."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The layout and its sizes in words."""

    @property
    @abstractmethod
    def memories(self) -> tuple[Memory, ...]:
        """What the layer remembers of a sequence; keys and values of each token come first."""

    @property
    def kv(self) -> PerToken:
        """The keys and values of each token, the first where there are several kinds.

        Raises:
            ConfigError: The layout keeps none.
        """
        for memory in self.memories:
            if (found := memory.keys_and_values) is not None:
                return found
        raise ConfigError(
            f"{type(self).__name__} keeps no keys and values of each token: its memories are "
            f"{', '.join(map(str, self.memories)) or 'none'}"
        )

    @property
    def one_pass(self) -> str | None:
        """Why it computes whole texts and has no cache; None: it can have one."""
        return None

    @property
    def no_eviction(self) -> str | None:
        """Why a cache cannot evict keys; None: it can."""
        return f"{self.layout} does not weigh keys of single tokens by one softmax alone"

    @property
    def of_context(self) -> AttentionConfig | None:
        """The attention to the encoder's output that is part of it; None: it has none."""
        return None

    @property
    def token_elements(self) -> float:
        """Numbers that one more token adds to a cache row, all memories."""
        return sum(memory.token_elements for memory in self.memories)

    @property
    def hands_on(self) -> frozenset[str]:
        """What later layers may read of a call of this one, by name."""
        return frozenset()

    @property
    def reads(self) -> Mapping[str, int]:
        """What this layer reads of earlier ones in the same call: a name, and a layer's number."""
        return {}

    @property
    def reads_streams(self) -> int:
        """Residual streams that it reads side by side, and adds to; 0: one vector of each token."""
        return 0

    @property
    def shared_weights(self) -> Mapping[str, int]:
        """Its modules that have an earlier layer's weights: a name, and that layer's number."""
        return {}

    @property
    def handed_elements(self) -> int:
        """Numbers per token of what it hands on, which later layers keep alive without a cache."""
        return 0

    def check_source(self, what: str, source: HeadLayout) -> None:
        """Raises ConfigError where ``source`` hands on, or has, what this layer cannot read.

        Args:
            what: A name among ``reads`` or ``shared_weights``.
            source: The layer that it is read from, which hands it on or has its own.
        """

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Features of one of the ``output_heads``."""

    @property
    @abstractmethod
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""

    @property
    def output_heads(self) -> int:
        """Heads whose outputs the output projection reads."""
        return self.num_heads

    @property
    def attention_span(self) -> AttentionSpan:
        """Which keys a query sees of those that a mask shows it."""
        return AttentionSpan()

    @property
    def visible_window(self) -> int | None:
        """Keys behind a query that it sees at most, itself included; None: all."""
        return self.attention_span.window

    @abstractmethod
    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters, norms of queries, keys and latents included."""

    @abstractmethod
    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        """The cost of a call with ``queries`` new tokens per row after ``cached`` ones."""

    @abstractmethod
    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        """Elements per token that a prefill without gradients holds at a time, at most.

        The layer's input is not counted; its output is.

        Args:
            embed_dim: Embedding size E of the residual stream.
            call: What is computed.
        """

    @abstractmethod
    def with_num_kv_heads(self, num_kv_heads: int) -> HeadLayout:
        """The same query heads with at most ``num_kv_heads`` heads of keys and values."""


@dataclass(frozen=True)
class Network(OneOfSeveral, ABC):
    """A layer's feed-forward network, of any kind."""

    where: ClassVar[Mapping[str, str]] = {
        "plain": "polyhead.config.feed_forward",
        "mixture": "polyhead.config.mixture",
        "identity_mixture": "polyhead.config.identity_mixture",
        "weighed_shared": "polyhead.config.weighed_shared",
        "depth_averaged_mixture": "polyhead.config.depth_averaged_mixture",
        "token_mixture": "polyhead.config.token_mixture",
        "sub_norm": "polyhead.config.sub_norm",
        "dense_and_experts": "polyhead.config.dense_and_experts",
        "grouped": "polyhead.config.grouped",
    }
    norms_input: ClassVar[bool] = False
    """Whether it norms what it reads by itself, so that its layer has no norm before it."""
    reads_tokens: ClassVar[bool] = False
    """Whether it reads the ids of the call (``TOKENS``), which are handed on to it."""

    @property
    def state_dim(self) -> int:
        """Features of a state that it hands on to the network of the next layer; 0: none."""
        return 0

    @property
    def reads_dim(self) -> int:
        """Features of the state that it reads of the layer before; 0: none."""
        return 0

    @property
    def takes_handed(self) -> bool:
        """Whether its calls are given what is handed on."""
        return self.reads_tokens or self.state_dim > 0

    @abstractmethod
    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters, routers and their biases included."""

    @abstractmethod
    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        """Elements per token that a pass without gradients holds at a time, output included."""

    @abstractmethod
    def widths(self) -> Mapping[str, int]:
        """Hidden sizes that ranks divide, by the name of their field."""


NORMED_HALF = 5
"""Memory of torch's norm as a multiple of its input: input in float32, result in float32, result
rounded."""

ROTATED = 2
"""Memory of torch's rotation as a multiple of its input: x · cos, and x with its halves swapped."""


def shared(count: int, ranks: int) -> int:
    """Most units on one rank."""
    return -(-count // ranks)
