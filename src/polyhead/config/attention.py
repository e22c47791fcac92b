"""One attention layer (MHA, GQA, MQA) as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from polyhead.config.data import Data, check_choice, check_positive, check_whole
from polyhead.config.layout import (
    NORMED_HALF,
    ROTATED,
    AttentionSpan,
    CallCost,
    HeadLayout,
    Prefill,
    shared,
)
from polyhead.config.memories import Memory, PerToken
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class QKNormConfig(Data):
    """Normalized queries and keys; ``place`` is where, since three families do it differently.

    ``"before_rope"``: per head, before rotary (Qwen3, Gemma 3). ``"after_rope"``: per head, after
    rotary (Hunyuan, Llama 4). ``"full_width"``: over all heads at once, before the split (OLMo 2,
    OLMoE, MiniMax-M2). ``per_head``: every head has a weight of its own, ``[H, D]`` (Cohere,
    StableLM); else one weight ``[D]`` for all.
    """

    norm: NormConfig = field(default_factory=NormConfig)
    place: Literal["before_rope", "after_rope", "full_width"] = "before_rope"
    per_head: bool = False

    def __post_init__(self) -> None:
        check_choice("qk_norm place", self.place, ("before_rope", "after_rope", "full_width"))
        if self.per_head and self.place == "full_width":
            raise ConfigError("qk_norm per_head needs a place per head: got place='full_width'")


@dataclass(frozen=True)
class ALiBiConfig(Data):
    """Linear biases (Press et al. 2022): scores lose slope · distance, a slope for each head.

    ``max_bias``: slopes are 2^(-max_bias · i / H), and for a number of heads that is not a power of
    two the paper's interleaving (MPT's ``alibi_bias_max``). ``scale``: factor of the bias (Falcon
    multiplies it with the scores by 1/√head_dim). ``rounded``: slope · key position is rounded to
    bfloat16 whatever the model's dtype, as Falcon does.
    """

    max_bias: float = 8.0
    scale: float = 1.0
    rounded: bool = False

    def __post_init__(self) -> None:
        check_positive("alibi max_bias", self.max_bias)
        check_positive("alibi scale", self.scale)


@dataclass(frozen=True)
class RelativeBiasConfig(Data):
    """T5's learned bias by bucketed distance, one table ``[num_buckets, H]`` for a whole stack.

    In an encoder keys ahead have buckets of their own, in a decoder they share the first. Behind a
    soft prompt of S segments the table has S² rows more, of pairs of segments.

    Attributes:
        num_buckets: Number of buckets of distances.
        max_distance: From which on all are alike.
        per_layer: Every layer has a table of its own (UMT5).
    """

    num_buckets: int = 32
    max_distance: int = 128
    per_layer: bool = False

    def __post_init__(self) -> None:
        check_whole("relative bias num_buckets", self.num_buckets, least=4)
        check_whole("relative bias max_distance", self.max_distance)


@dataclass(frozen=True)
class QueryTemperatureConfig(Data):
    """Queries grow with their position p: q · (1 + scale · log(1 + floor((p + offset) / every))).

    Llama 4 does it (with ``offset`` 1) on layers without rotary positions, Ministral 3 (0) on all.
    ``power``: they grow as a power instead, q · (1 + (p + offset) / every)^scale (Beam).
    ``steps`` False: by every token, from ``every`` on: q · (1 + scale · log(max(1, (p + offset) /
    every))) (Inkling).
    """

    scale: float
    every: int
    offset: int = 0
    power: bool = False
    steps: bool = True

    def __post_init__(self) -> None:
        check_whole("query temperature every", self.every)
        check_whole("query temperature offset", self.offset, least=0)
        if self.power and not self.steps:
            raise ConfigError("a query temperature has power or steps=False: got both")


MOST_HEADS = 1 << 20
"""Most heads: a thousand times as many as any model has, and few enough for quick computations."""


@dataclass(frozen=True)
class AttentionConfig(HeadLayout, kind="heads"):
    """One attention layer. ``num_kv_heads``: H is MHA, 1 is MQA, a divisor of H between is GQA.

    ``window``: keys behind a query that it sees, itself included; ``window_ahead``: keys ahead of
    it, for encoders (ModernBERT sees w/2 on either side: window w/2 + 1, window_ahead w/2).
    ``chunk``: positions are cut into runs of so many, and a query sees its own run (Llama 4), and
    ``chunks_before`` runs before it (Reformer).
    ``rope`` None is no rotation in this layer (SmolLM3, Cohere 2, EXAONE 4 leave it out in some).
    ``v_norm``: values are normalized per head. ``values_from_keys``: keys as they are projected,
    before norm and rotation, are the values too, and there is no projection of values (Gemma 4 has
    both). ``hands_on_keys``: later layers of the model may read this one's keys and values.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None  # None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNormConfig | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    k_bias: bool | None = None  # None: qkv_bias (Whisper's keys have none)
    qkv_clip: float | None = None  # q, k, v within ±clip, after full-width norms, before rope
    alibi: ALiBiConfig | None = None
    window_ahead: int | None = None  # None: no limit but the mask's
    chunk: int | None = None
    query_temperature: QueryTemperatureConfig | None = None
    v_norm: NormConfig | None = None
    values_from_keys: bool = False
    hands_on_keys: bool = False
    value_scale: float = 1.0  # factor of the values (MiMo-V2)
    chunks_before: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name))
        if self.v_head_dim is not None:
            check_whole("v_head_dim", self.v_head_dim)
        if self.num_heads > MOST_HEADS:
            raise ConfigError(f"num_heads must be at most {MOST_HEADS:,}: got {self.num_heads:,}")
        if self.num_heads % self.num_kv_heads:
            near = range(1, min(self.num_heads, 1024) + 1)
            divisors = [g for g in near if self.num_heads % g == 0]
            raise ConfigError(
                f"num_kv_heads must divide num_heads: got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}; use one of {divisors}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1 key or None: got {self.window!r}")
        if self.window_ahead is not None:
            check_whole("window_ahead", self.window_ahead, least=0)
            if self.window is None:
                raise ConfigError("window_ahead needs a window: got window=None")
        if self.chunk is not None:
            check_whole("chunk", self.chunk)
            if self.window is not None:
                raise ConfigError(
                    f"a layer has a window or a chunk: got window={self.window}, chunk={self.chunk}"
                )
        check_whole("chunks_before", self.chunks_before, least=0)
        if self.chunks_before and self.chunk is None:
            raise ConfigError("chunks_before need a chunk: got chunk=None")
        if self.values_from_keys and self.value_dim != self.head_dim:
            raise ConfigError(
                f"values_from_keys needs values of the keys' size {self.head_dim}: got "
                f"v_head_dim={self.v_head_dim}"
            )
        if self.qkv_clip is not None:
            check_positive("qkv_clip", self.qkv_clip)
        check_positive("value_scale", self.value_scale)
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be positive or None (off): got {self.softcap!r}")

    @property
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""
        return self.head_dim

    @property
    def query_rows(self) -> int:
        """Rows of ``q_proj``."""
        return self.num_heads * self.head_dim

    @property
    def input_vectors(self) -> int:
        """Vectors of a token that are projected, side by side."""
        return 1

    @property
    def has_k_bias(self) -> bool:
        """Whether the projection of keys has a bias."""
        return self.qkv_bias if self.k_bias is None else self.k_bias

    @property
    def makes_keys(self) -> bool:
        """Whether the layer makes keys and values of its own, and reads no other layer's."""
        return True

    @property
    def projects_values(self) -> bool:
        """Whether values are what a projection of their own makes of the layer's input."""
        return self.v_norm is None and not self.values_from_keys

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def layout(self) -> str:
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else f"GQA-{self.num_kv_heads}"

    @property
    def described(self) -> str:
        return (
            f"{self.layout} {self.num_heads} query / {self.num_kv_heads} kv heads × {self.head_dim}"
        )

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (PerToken(self.num_kv_heads, self.head_dim, self.value_dim),)

    @property
    def no_eviction(self) -> str | None:
        if type(self) is not AttentionConfig:  # a subclass says so itself
            return super().no_eviction
        return "later layers read its keys" if self.hands_on_keys else None

    @property
    def projected_kv(self) -> PerToken:
        """The keys and values that projections make of a token."""
        return self.kv

    @property
    def hands_on(self) -> frozenset[str]:
        return frozenset(("keys",)) if self.hands_on_keys else frozenset()

    @property
    def handed_elements(self) -> int:
        return self.kv.elements if self.hands_on_keys else 0

    @property
    def attention_span(self) -> AttentionSpan:
        if self.chunks_before:  # at most
            return AttentionSpan(self.visible_window, self.window_ahead)
        return AttentionSpan(self.window, self.window_ahead, self.chunk)

    @property
    def visible_window(self) -> int | None:
        if self.chunk is not None:
            return self.chunk * (1 + self.chunks_before)
        return None if self.window is None else self.window + (self.window_ahead or 0)

    def query_matrices(self, read: int) -> list[tuple[int, int, int, bool]]:
        """What makes queries: units, rows of each, columns, and whether with a bias.

        Args:
            read: Features that they are made from.
        """
        made = self.output_heads
        return [(made, self.num_heads // made * self.head_dim, read, self.qkv_bias)]

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        E, H, G, D = embed_dim, self.num_heads, self.num_kv_heads, self.head_dim
        read = self.input_vectors * E
        C = read if context_dim is None else context_dim
        projected = self.query_matrices(read)
        if self.makes_keys:
            held = self.projected_kv  # of differential heads in pairs
            projected.append((held.num_kv_heads, held.key_dim, C, self.has_k_bias))
            if not self.values_from_keys:
                projected.append((held.num_kv_heads, held.value_dim, C, self.qkv_bias))
        for units, size, features, bias in projected:
            yield ParameterGroup("attention", units, size * features)
            if bias:
                yield ParameterGroup("attention", units, size, multiplied=False)
        yield ParameterGroup("attention", self.output_heads, self.value_dim * E)
        if self.out_bias:
            yield ParameterGroup("attention", 1, E, multiplied=False)
        if self.sinks:
            yield ParameterGroup("attention", H, 1, multiplied=False)
        if self.qk_norm is not None:
            size = self.qk_norm.norm.parameters(D)
            each = self.qk_norm.place == "full_width" or self.qk_norm.per_head
            for units in (H, G) if self.makes_keys else (H,):
                yield ParameterGroup("norms", units if each else 1, size, multiplied=False)
        if self.v_norm is not None and self.makes_keys:
            yield ParameterGroup(
                "norms", 1, self.v_norm.parameters(self.value_dim), multiplied=False
            )

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        return CallCost(self.num_heads * (self.head_dim + self.value_dim))

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        Q, K, V = H * self.head_dim, G * self.head_dim, G * self.value_dim
        copies, behind = self._copies(call.half), 2 * H * self.value_dim + embed_dim
        values = 0 if self.value_scale == 1.0 else 1
        if self.v_norm is not None:
            values += NORMED_HALF if call.half else 1
        held = max(copies * Q, Q + copies * K if copies else 0, values * V, behind)
        return Q + K + V + held

    def _copies(self, half: bool) -> int:
        """Extra memory while q or k is normed and rotated, as a multiple of its size."""
        rotated = 0 if self.rope is None else ROTATED
        if self.qk_norm is None:
            return rotated
        normed = NORMED_HALF if half else 1
        if self.rope is None:
            return normed
        last = self.qk_norm.place == "after_rope"
        first, second = (rotated, normed) if last else (normed, rotated)
        return max(first, 1 + second)

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        return replace(self, num_kv_heads=greatest_divisor(self.num_heads, num_kv_heads))


def greatest_divisor(number: int, most: int) -> int:
    """The greatest divisor that is at most ``most``."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max(d for d in (*small, *(number // d for d in small)) if d <= max(1, most))
