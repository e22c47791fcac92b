"""Multi-head latent attention as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.attention import AttentionConfig, QueryTemperatureConfig
from polyhead.config.data import check_positive, check_share, check_whole
from polyhead.config.layout import AttentionSpan, CallCost, HeadLayout, Prefill, shared
from polyhead.config.memories import Memory, PerToken
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.rope import RopeConfig
from polyhead.errors import ConfigError

Computation = Literal["absorbed", "expanded"]
COMPUTATIONS: tuple[Computation, ...] = ("absorbed", "expanded")


@dataclass(frozen=True)
class ComputationCost:
    """One way to compute.

    Attributes:
        flops: Floating-point operations (2 per multiply-add) beside the projections that both ways
            share.
        elements: Elements of the keys and values that attention reads, those made for it included.
    """

    flops: int
    elements: int


@dataclass(frozen=True)
class LatentAttentionConfig(HeadLayout, kind="latent"):
    """One latent attention layer (DeepSeek-V2, 2024, §2.1), in the names of DeepSeek's config.json.

    A key has ``qk_nope_head_dim`` features made from the latent and ``qk_rope_head_dim`` rotated
    ones that all heads share; one of the two may be 0 (GLM-5.3 rotates none). ``bias`` is of the
    projections into the latents and of ``o_proj`` (``attention_bias`` in the files), ``q_bias`` of
    a ``q_proj`` straight from the input. ``norm`` is over the latents; None: latents are used as
    they are projected. ``latent_scale`` is a factor of the normed latent that keys and values are
    made from. ``window``: keys behind a query that it sees, itself included; None: all.
    ``rope_norm``: the rotary key has a norm too, before it is rotated (dots3.note).
    ``query_temperature``: queries grow with their position (Mistral 4). ``latent_heads``: equal
    parts of the latent, each normed by itself, of which each serves as many query heads (grouped
    latent attention, Zadouri et al. 2025, arXiv 2505.21487). ``scale`` None is 1/√(key size), times
    the square of yarn's temperature where the rotary scaling has ``mscale_all_dim``.

    Raises:
        ConfigError: A size that is impossible, or a ``rope`` over other features than the rotary
            part.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries straight from the input (V2-Lite)
    bias: bool = False
    norm: NormConfig | None = field(default_factory=lambda: NormConfig(eps=1e-6))
    q_bias: bool = False
    latent_scale: float = 1.0
    window: int | None = None
    rope_norm: bool = False
    rope: RopeConfig | None = field(default_factory=RopeConfig, kw_only=True)
    query_temperature: QueryTemperatureConfig | None = field(default=None, kw_only=True)
    latent_heads: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
            "latent_heads",
        ):
            value = getattr(self, name)
            if value is None and name == "q_lora_rank":
                continue
            check_whole(name, value, least=0 if name.startswith("qk_") else 1)
        if not self.qk_head_dim or (self.rope is not None and not self.qk_rope_head_dim):
            raise ConfigError(
                "a key has features, and rope is over some of them: got qk_nope_head_dim="
                f"{self.qk_nope_head_dim}, qk_rope_head_dim={self.qk_rope_head_dim}, "
                f"rope={self.rope}"
            )
        if self.q_bias and self.q_lora_rank is not None:
            raise ConfigError(
                f"q_bias needs queries straight from the input: got q_lora_rank={self.q_lora_rank}"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even: got {self.qk_rope_head_dim}")
        if self.rope is not None and self.rope.dim not in (None, self.qk_rope_head_dim):
            raise ConfigError(
                f"rope dim must be qk_rope_head_dim={self.qk_rope_head_dim} or None: got "
                f"{self.rope.dim}"
            )
        check_positive("latent_scale", self.latent_scale)
        if self.window is not None:
            check_whole("window", self.window)
        if self.rope_norm and (self.norm is None or not self.qk_rope_head_dim):
            raise ConfigError(
                "rope_norm needs a norm and a rotary key: got "
                f"norm={self.norm}, qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        if self.num_heads % self.latent_heads or self.kv_lora_rank % self.latent_heads:
            raise ConfigError(
                f"latent_heads must divide num_heads={self.num_heads} and kv_lora_rank="
                f"{self.kv_lora_rank}: got {self.latent_heads}"
            )
        check_share("dropout", self.dropout)

    @property
    def qk_head_dim(self) -> int:
        """Features of one head's query and key when expanded."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""
        return self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements that the cache keeps per token: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def latent_head_dim(self) -> int:
        """Features of the latent that one head's keys and values are made from."""
        return self.kv_lora_rank // self.latent_heads

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        if self.scale is not None:
            return self.scale
        temperature, rope = 1.0, self.rope
        if rope is not None and rope.mscale_all_dim and rope.factor is not None and rope.factor > 1:
            temperature = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
        return temperature**2 / math.sqrt(self.qk_head_dim)

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def attention_span(self) -> AttentionSpan:
        return AttentionSpan(window=self.window)

    @property
    def layout(self) -> str:
        return self._kind

    @property
    def described(self) -> str:
        latent = f"latent {self.kv_lora_rank} + {self.qk_rope_head_dim}"
        return f"{self._kind} {self.num_heads} heads, {latent}"

    @property
    def _kind(self) -> str:
        return "MLA" if self.latent_heads == 1 else f"GLA-{self.latent_heads}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (PerToken(1, self.latent_dim, self.kv_lora_rank, latent=True),)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        E, H, R, V = embed_dim, self.num_heads, self.kv_lora_rank, self.v_head_dim
        into = self.q_lora_rank
        if into is None:
            yield ParameterGroup("attention", H, self.qk_head_dim * E)
            if self.q_bias:
                yield ParameterGroup("attention", H, self.qk_head_dim, multiplied=False)
        else:
            yield ParameterGroup("attention", 1, into * E)
            yield self._norm_piece(into)
            yield ParameterGroup("attention", H, self.qk_head_dim * into)
        yield ParameterGroup("attention", 1, self.latent_dim * E)
        yield self._norm_piece(R)
        if self.rope_norm:
            yield self._norm_piece(self.qk_rope_head_dim)
        up = (self.qk_nope_head_dim + V) * self.latent_head_dim
        yield ParameterGroup("attention", H, up, as_numbers=True)
        yield ParameterGroup("attention", H, V * E)
        if self.bias:
            yield ParameterGroup(
                "attention", 1, (into or 0) + self.latent_dim + E, multiplied=False
            )

    def _norm_piece(self, size: int) -> ParameterGroup:
        count = 0 if self.norm is None else self.norm.parameters(size)
        return ParameterGroup("norms", 1, count, multiplied=False)

    def cost(
        self, computation: Computation, batch_size: int, queries: int, keys: int
    ) -> ComputationCost:
        """The cost of one call; every query is counted with every key."""
        H = self.num_heads
        up = self.latent_head_dim * H * (self.qk_nope_head_dim + self.v_head_dim)
        pairs = batch_size * queries * keys * self._per_pair(computation)
        if computation == "expanded":
            elements = batch_size * keys * H * (self.qk_head_dim + self.v_head_dim)
            return ComputationCost(2 * (batch_size * keys * up + pairs), elements)
        read = self.kv_lora_rank + self.latent_heads * self.qk_rope_head_dim
        return ComputationCost(2 * (batch_size * queries * up + pairs), batch_size * keys * read)

    def choose(self, batch_size: int, queries: int, keys: int) -> Computation:
        """The computation with fewer operations; on a tie the one that makes fewer tensors."""
        absorbed, expanded = (self.cost(way, batch_size, queries, keys) for way in COMPUTATIONS)
        return "expanded" if expanded.flops < absorbed.flops else "absorbed"

    @property
    def absorbed_from(self) -> int | None:
        """The fewest keys for which ``choose`` takes one query absorbed; None: never."""
        up = self.latent_head_dim * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        gained = up + self._per_pair("expanded") - self._per_pair("absorbed")
        return -(-up // gained) if gained > 0 else None

    def _per_pair(self, computation: Computation) -> int:
        if computation == "expanded":
            return self.num_heads * (self.qk_head_dim + self.v_head_dim)
        return self.num_heads * (2 * self.latent_head_dim + self.qk_rope_head_dim)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        way = self.choose(batch_size, queries, cached + queries)
        # Both counts include making keys and values of the new tokens.
        remade = self.cost(way, batch_size, 0, cached).flops if way == "expanded" else 0
        return CallCost(self._per_pair(way), remade)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        H, N = shared(self.num_heads, call.ranks), self.qk_nope_head_dim
        R, V, P = self.latent_head_dim, self.v_head_dim, self.qk_rope_head_dim
        projected = H * (self.qk_head_dim + P) + self.latent_dim
        out = 2 * H * V + embed_dim
        if self.choose(call.batch_size, call.tokens, call.tokens) == "absorbed":
            # Both products with parts of Wkv_b copy their left side into another order.
            q = H * (R + P)
            if self.latent_heads > 1:  # keys are copied
                projected += self.kv_lora_rank + self.latent_heads * P
            return projected + max(H * R + max(H * N, q), q + max(2 * H * R + H * V, out))
        return projected + H * (N + V) + 2 * H * self.qk_head_dim + out

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        most = min(num_kv_heads, self.num_heads)
        return AttentionConfig(self.num_heads, most, self.v_head_dim, rope=self.rope)
