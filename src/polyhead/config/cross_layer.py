"""Heads that attend to the keys and values of an earlier layer, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import HeadLayout
from polyhead.config.memories import Memory, OfLayer, PerToken
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class CrossLayerAttentionConfig(AttentionConfig, kind="cross_layer"):
    """``AttentionConfig`` without keys and values of its own.

    Attributes:
        keys_of: Number of the earlier layer whose keys and values it reads; as many kv heads of
            the same sizes, within a window that is no wider, and ``hands_on_keys`` there.

    ``rope`` and ``qk_norm`` are those of the queries.
    """

    keys_of: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("keys_of", self.keys_of, least=0)
        for name in ("v_norm", "values_from_keys", "hands_on_keys", "k_bias", "qkv_clip"):
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"a layer that reads another's keys has no {name}")
        if self.value_scale != 1.0:
            raise ConfigError(
                f"a layer that reads another's values has no value_scale: got {self.value_scale}"
            )

    @property
    def layout(self) -> str:
        return f"{super().layout} of layer {self.keys_of}"

    @property
    def described(self) -> str:
        return f"{super().described}, keys and values of layer {self.keys_of}"

    @property
    def memories(self) -> tuple[Memory, ...]:
        held = PerToken(self.num_kv_heads, self.head_dim, self.value_dim)
        return (OfLayer(self.keys_of, held),)

    @property
    def reads(self) -> Mapping[str, int]:
        return {"keys": self.keys_of}

    def check_source(self, what: str, source: HeadLayout) -> None:
        held = source.kv
        if held != self.memories[0].borrowed:
            raise ConfigError(
                f"keys_of needs a layer with {self.num_kv_heads} kv heads, keys of "
                f"{self.head_dim} and values of {self.value_dim} features: layer {self.keys_of} "
                f"has {held}"
            )
        ours, theirs = self.attention_span, source.attention_span
        within = theirs.window is None or (ours.window or theirs.window + 1) <= theirs.window
        if not within or theirs.chunk not in (None, ours.chunk):
            raise ConfigError(
                f"keys_of needs a layer that sees no fewer keys: layer {self.keys_of} sees "
                f"{theirs}, this one {ours}"
            )

    @property
    def makes_keys(self) -> bool:
        return False
