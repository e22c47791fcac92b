"""Keys of config.json that several families share, read. ``writing`` is the inverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.config.feed_forward import Activation
from polyhead.errors import ConfigError, shortened
from polyhead.families.common.keys import Keys

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "mish": "mish",
    "tanh": "tanh",
    "xielu": "xielu",
}

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"
UNLIMITED = 1 << 20
"""Positions of a model that has none and no key that bounds a text."""

# Endings of class names with a language model's head.
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "WithLMHead", "ForConditionalGeneration", "MTModel")


_OF_A_HEAD = ("head_bias", "head_transforms", "unused_ids")


@dataclass(frozen=True)
class Sizes:
    """The numbers that every decoder has."""

    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    def attention(
        self, kind: type[AttentionConfig] = AttentionConfig, **options: Any
    ) -> AttentionConfig:
        """An attention layer of these sizes."""
        return kind(self.num_heads, self.num_kv_heads, self.head_dim, **options)


def read_sizes(keys: Keys, *, own_head_dim: bool = True, max_positions: int | None = None) -> Sizes:
    """``hidden_size``, ``num_attention_heads``, ``num_key_value_heads`` (null or absent without a
    default: as many as heads), ``head_dim`` (hidden_size / heads), ``num_hidden_layers``,
    ``max_position_embeddings``.

    Args:
        keys: keys of config.json.
        own_head_dim: whether the family has the key ``head_dim``.
        max_positions: where the file may leave it out.
    """
    embed_dim, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", None) if own_head_dim else None
    return Sizes(
        embed_dim=embed_dim,
        num_layers=keys.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=head_dim or divided(keys, embed_dim, num_heads),
        max_positions=_max_positions(keys, max_positions),
    )


def read_mha_sizes(keys: Keys, *, max_positions: int | None = None) -> Sizes:
    """Sizes of families with keys for every head: no ``num_key_value_heads`` or ``head_dim``.

    Args:
        keys: keys of config.json.
        max_positions: where the file may leave it out.
    """
    embed_dim, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return Sizes(
        embed_dim=embed_dim,
        num_layers=keys.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divided(keys, embed_dim, num_heads),
        max_positions=_max_positions(keys, max_positions),
    )


def _max_positions(keys: Keys, default: int | None) -> int:
    key = "max_position_embeddings"
    return keys.whole(key) if default is None else keys.whole(key, default)


def read_rms_norm(keys: Keys, key: str = "rms_norm_eps") -> NormConfig:
    return NormConfig("rmsnorm", eps=keys.number(key))


def read_layer_norm(keys: Keys, key: str = "layer_norm_eps", bias: bool = True) -> NormConfig:
    return NormConfig("layernorm", eps=keys.number(key), bias=bias)


def read_network(keys: Keys, *, gated: bool = True, bias: bool = False) -> FeedForwardConfig:
    """``intermediate_size`` and ``hidden_act``."""
    return FeedForwardConfig(
        keys.whole("intermediate_size"), activation=read_activation(keys), gated=gated, bias=bias
    )


def read_late_windows(keys: Keys, num_layers: int) -> list[int | None]:
    """The window of every layer: of those from ``max_window_layers`` on, or by ``layer_types``."""
    window = keys.whole("sliding_window", None)
    used, first = keys.flag("use_sliding_window"), keys.whole("max_window_layers")
    late = SLIDING if used and window is not None else FULL
    default = [FULL if i < first else late for i in range(num_layers)]
    types = read_layer_types(keys, num_layers, default)
    if SLIDING in types and not (used and window is not None):
        raise keys.refused(
            "layer_types", types, "sliding_attention only with use_sliding_window and a window"
        )
    return [window if kind == SLIDING else None for kind in types]


def read_decoder(
    keys: Keys,
    layers: Sequence[LayerConfig],
    *,
    max_positions: int,
    norm: NormConfig | None,
    embedding: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008  # frozen
    kind: Literal["decoder", "encoder-decoder"] = "decoder",
    **options: Any,
) -> TransformerConfig:
    """The decoder around some layers; the other keys are taken from the file.

    Args:
        keys: keys of config.json.
        layers: all of them.
        max_positions: how many the model reads.
        norm: after the last layer.
        embedding: what enters the first layer.
        kind: ``"decoder"``, or another; ``options`` have an encoder-decoder's encoder.
        **options: further fields of ``TransformerConfig``; those of a head are left out of a bare
            body.
    """
    head = read_head(keys)
    if head is None:
        options = {key: option for key, option in options.items() if key not in _OF_A_HEAD}
    return TransformerConfig(
        kind=kind,
        vocab_size=keys.whole("vocab_size"),
        embed_dim=keys.size("hidden_size"),
        max_positions=max_positions,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=norm,
        head=head,
        **read_token_ids(keys),
        **options,
    )


def read_token_ids(keys: Keys) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` about special tokens."""
    return {
        "bos_token_id": _token_id(keys, "bos_token_id"),
        "eos_token_ids": as_ids(keys.take("eos_token_id", None)),
        "pad_token_id": _token_id(keys, "pad_token_id"),
    }


def read_activation(keys: Keys, key: str = "hidden_act") -> Activation:
    """The activation that a key names."""
    return keys.choice(key, ACTIVATIONS)


def read_head(keys: Keys) -> Literal["tied", "untied"] | None:
    """``tie_word_embeddings``, and None where ``architectures`` names a bare body."""
    tied = keys.flag("tie_word_embeddings")
    names = keys.take("architectures", None) or [_WITH_HEAD[0]]
    first = str(names[0]) if isinstance(names, list) else ""
    if first.endswith(_WITH_HEAD):
        return "tied" if tied else "untied"
    if first.endswith("Model"):
        return None
    raise keys.refused("architectures", names, f"a class named ...{' or ...'.join(_WITH_HEAD)}")


def read_layer_types(
    keys: Keys,
    num_layers: int,
    default: list[str],
    kinds: Sequence[str] = LAYER_TYPES,
    key: str = "layer_types",
) -> list[str]:
    """Which layers see everything and which a window, or another of two ``kinds``."""
    types = keys.take(key, None)
    if types is None:
        return default
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in kinds for kind in types)
    ):
        raise keys.refused(key, types, f"{num_layers} of {' and '.join(kinds)}")
    return types


def divided(keys: Keys, embed_dim: int, num_heads: int) -> int:
    """Features of a head where the file does not say."""
    if num_heads < 1 or embed_dim % num_heads:
        raise keys.refused(
            "num_attention_heads", num_heads, f"a divisor of hidden_size={embed_dim}, or head_dim"
        )
    return embed_dim // num_heads


def _token_id(keys: Keys, key: str) -> int | None:
    """Old files write -1 for "none"."""
    value = keys.whole(key, None)
    return None if value is None or value < 0 else value


def as_ids(value: Any) -> tuple[int, ...]:
    """config.json writes no id, one id or a list of ids under the same key."""
    entries = value if isinstance(value, list) else [value]
    if value is None:
        return ()
    if any(type(entry) is not int for entry in entries):
        raise ConfigError(
            f"eos_token_id must be a whole number or a list of them: got {shortened(value)}"
        )
    return tuple(entries)
