"""What the layouts of sparse encoders have in common: attention to several sets of keys."""

from __future__ import annotations

from polyhead.config.attention import AttentionConfig
from polyhead.config.layout import shared
from polyhead.errors import ConfigError


def check_plain(config: AttentionConfig, what: str, *, allowed: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for what heads over several sets of keys cannot have."""
    behind = config.window is not None and config.window_ahead is None
    if behind and "window" not in allowed:
        raise ConfigError(f"{what} belong to an encoder: give window_ahead beside window")
    plain = AttentionConfig(config.num_heads, config.num_kv_heads, config.head_dim)
    for name in (
        "rope", "qk_norm", "v_norm", "alibi", "qkv_clip", "query_temperature", "sinks",
        "values_from_keys", "hands_on_keys", "value_scale", "chunk",
    ):  # fmt: skip
        if name not in allowed and getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"{what} go without {name}: got {getattr(config, name)!r}")


def merged_elements(config: AttentionConfig, ranks: int) -> int:
    """Elements per token of two states and what they are merged to."""
    return 6 * shared(config.num_heads, ranks) * config.value_dim
