"""Decoders that differ from Llama in a choice or two: one reader with these as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    HeadLayout,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    Sizes,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope, stated_length, write_ropes

PLAIN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Defaults of most of them."""


class Plain:
    """The parts of a Llama-like decoder; a family changes some and puts them together.

    Args:
        keys: Keys of config.json.
        norm: Key of the epsilon of the norms; default ``rms_norm_eps``.
        network: Default SwiGLU, with ``mlp_bias`` where the family has that key.
        rope: How ``read_rope`` is called.

    Attributes:
        sizes: The decoder's numbers.
        rope: Rotary positions of all layers.
        norm: Norm of all layers.
        network: Network of all layers.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        norm: NormConfig | None = None,
        network: FeedForwardConfig | None = None,
        **rope: Any,
    ) -> None:
        self.keys, self.sizes = keys, read_sizes(keys)
        self.norm = read_rms_norm(keys) if norm is None else norm
        self.rope: RopeConfig = read_rope(
            keys, self.sizes.head_dim, self.sizes.max_positions, **rope
        )
        self.network = read_network(keys) if network is None else network

    def attention(self, *, out_bias: bool | None = None, **options: Any) -> Any:
        """An attention layer; ``attention_bias`` is of q, k and v, and of o unless said."""
        sizes: Sizes = self.sizes
        biased = self.keys.flag("attention_bias", False)
        return sizes.attention(
            qkv_bias=biased,
            out_bias=biased if out_bias is None else out_bias,
            rope=self.rope,
            dropout=self.keys.number("attention_dropout", 0.0),
            **options,
        )

    def layer(self, attention: HeadLayout, network: Any = None, **options: Any) -> LayerConfig:
        return LayerConfig(attention, network or self.network, self.norm, **options)

    def decoder(
        self, layers: Sequence[LayerConfig], *, embedding_scale: float = 1.0, **options: Any
    ) -> TransformerConfig:
        """The model around the layers; one layer stands for all."""
        if len(layers) == 1:
            layers = [*layers] * self.sizes.num_layers
        return read_decoder(
            self.keys,
            layers,
            max_positions=reach(self.rope, self.sizes.max_positions),
            norm=self.norm,
            embedding=EmbeddingConfig(scale=embedding_scale),
            **options,
        )


def windowed(
    keys: Keys, attention: Any, count: int, default: Sequence[str], **on_full: Any
) -> list[Any]:
    """The attention of every layer by ``layer_types`` and ``sliding_window``.

    Args:
        keys: Keys of config.json.
        attention: Attention of the layers with a window.
        count: Number of layers.
        default: The types where the file gives none.
        **on_full: What is different in layers that see everything.
    """
    kinds = read_layer_types(keys, count, [*default])
    window = keys.whole("sliding_window", None)
    if SLIDING in kinds and window is None:
        raise keys.refused("sliding_window", window, "a number of keys, as layer_types has windows")
    of_kind = {FULL: replace(attention, **on_full), SLIDING: replace(attention, window=window)}
    return [of_kind[kind] for kind in kinds]


def every(count: int, pattern: int) -> list[str]:
    """Windows in all but each ``pattern``-th layer."""
    return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def write_window(config: TransformerConfig, default: int | None) -> dict[str, Any]:
    """``sliding_window`` of a family that wants a number even where no layer has a window."""
    windows = [layer.attention.visible_window for layer in config.layers]
    return {"sliding_window": next((each for each in windows if each is not None), default)}


def write_ropes_of_kinds(config: TransformerConfig, default: int | None) -> dict[str, Any]:
    """``rope_parameters`` of layers with a window and without, and the keys that follow."""
    found: list[Any] = [layer.attention for layer in config.layers]
    attentions = [each for each in found if hasattr(each, "window")]
    ropes = {FULL if each.window is None else SLIDING: each.rope for each in attentions}
    full, reached = ropes.get(FULL), config.max_positions
    return {
        **write_ropes(ropes, attentions[0].head_dim),
        "max_position_embeddings": reached if full is None else stated_length(full, reached),
        **write_window(config, default),
    }


def write_share(config: TransformerConfig) -> dict[str, Any]:
    """``partial_rotary_factor`` of a family that rotates only a part of a head by default."""
    attention: Any = config.layers[0].attention
    return {
        "partial_rotary_factor": (attention.rope.dim or attention.head_dim) / attention.head_dim
    }
