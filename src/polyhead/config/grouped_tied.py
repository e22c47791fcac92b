"""Grouped-tied attention as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig, greatest_divisor
from polyhead.config.layout import Prefill
from polyhead.config.memories import Memory, PerToken
from polyhead.errors import ConfigError

_LEFT_OUT = (
    "v_head_dim", "qk_norm", "qkv_clip", "query_temperature", "v_norm", "values_from_keys",
    "hands_on_keys", "value_scale",
)  # fmt: skip


@dataclass(frozen=True)
class GroupedTiedAttentionConfig(AttentionConfig, kind="grouped_tied"):
    """``AttentionConfig`` whose keys and values are tied (Zadouri et al. 2025, arXiv 2505.21487).

    A kv head has one state of ``head_dim`` features: its value, whose first half is the first half
    of its key too. The other half of the key is one half-head that all kv heads share, and ``rope``
    is over that half alone. ``k_bias`` is of its projection. A cache keeps num_kv_heads · head_dim
    + head_dim / 2 numbers of a token.

    Raises:
        ConfigError: As ``AttentionConfig``, or a ``head_dim`` without halves, or with rotary
            positions without pairs in a half, or an option that tied states have no place for.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        unit = 2 if self.rope is None else 4
        if self.head_dim % unit:
            raise ConfigError(
                f"head_dim must be a multiple of {unit}, since half of a key is "
                f"{'shared' if self.rope is None else 'shared and rotated'}: got {self.head_dim}"
            )
        if self.rope is not None and (self.rope.dim or 0) > self.rope_head_dim:
            raise ConfigError(
                f"rope dim must be at most half of head_dim={self.head_dim}: got {self.rope.dim}"
            )
        given = {name: getattr(self, name) for name in _LEFT_OUT}
        other = [f"{k}={v}" for k, v in given.items() if v != getattr(AttentionConfig, k)]
        if other:
            raise ConfigError(
                f"tied keys and values go without {', '.join(_LEFT_OUT)}: got {', '.join(other)}"
            )

    @property
    def rope_head_dim(self) -> int:
        return self.head_dim // 2

    @property
    def layout(self) -> str:
        return f"GTA-{self.num_kv_heads}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (PerToken(1, self.head_dim // 2, self.num_kv_heads * self.head_dim),)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        Q, K = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rotated = 0 if self.rope is None else 3 * Q // 2  # half of the queries, and all joined
        return K + Q + max(self.head_dim + rotated, K + 2 * Q + embed_dim)

    def with_num_kv_heads(self, num_kv_heads: int) -> AttentionConfig:
        most = greatest_divisor(self.num_heads, num_kv_heads)
        return AttentionConfig(self.num_heads, most, self.head_dim, rope=self.rope)
