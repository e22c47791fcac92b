"""Keys of config.json that several families share, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.tokenizer import as_ids
from polyhead.config import EmbeddingConfig, LayerConfig, NormConfig, TransformerConfig

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


def read_decoder(
    keys: Keys,
    layers: Sequence[LayerConfig],
    *,
    max_positions: int,
    norm: NormConfig,
    embedding: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008  # frozen
    logit_softcap: float | None = None,
) -> TransformerConfig:
    """The decoder around some layers; the other keys are taken from the file."""
    return TransformerConfig(
        kind="decoder",
        vocab_size=keys.whole("vocab_size"),
        embed_dim=keys.whole("hidden_size"),
        max_positions=max_positions,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=norm,
        head=_read_head(keys),
        logit_softcap=logit_softcap,
        **read_token_ids(keys),
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


def read_architecture(keys: Keys, *suffixes: str) -> str:
    """The first of ``architectures``: what kind of head the saved model had."""
    names = keys.take("architectures", None) or [suffixes[0]]
    if not isinstance(names, list) or not str(names[0]).endswith(suffixes):
        raise keys.refused("architectures", names, f"a class named ...{' or ...'.join(suffixes)}")
    return str(names[0])


def read_layer_types(keys: Keys, num_layers: int, default: list[str]) -> list[str]:
    """Which layers see everything and which a window."""
    types = keys.take("layer_types", None)
    if types is None:
        return default
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in LAYER_TYPES for kind in types)
    ):
        raise keys.refused("layer_types", types, f"{num_layers} of {' and '.join(LAYER_TYPES)}")
    return types


def divided(keys: Keys, embed_dim: int, num_heads: int) -> int:
    """Features of a head where the file does not say."""
    if num_heads < 1 or embed_dim % num_heads:
        raise keys.refused(
            "num_attention_heads", num_heads, f"a divisor of hidden_size={embed_dim}, or head_dim"
        )
    return embed_dim // num_heads


def write_decoder(config: TransformerConfig, class_prefix: str, model_type: str) -> dict[str, Any]:
    """What every family writes of a decoder in the same way."""
    return {
        "architectures": [class_prefix + ("ForCausalLM" if config.head else "Model")],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.layers[0].attention.num_heads,
        "rms_norm_eps": config.layers[0].norm.eps,
        "tie_word_embeddings": config.head == "tied",
        "attention_dropout": config.layers[0].attention.dropout,
        **write_token_ids(config),
    }


def write_token_ids(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of ``read_token_ids``."""
    eos = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
    }


def write_activation(ours: str) -> str:
    """The inverse of ``read_activation``."""
    return next(theirs for theirs, known in ACTIVATIONS.items() if known == ours)


def write_layer_types(windows: Iterable[int | None]) -> list[str]:
    """The inverse of ``read_layer_types``."""
    return [FULL if window is None else SLIDING for window in windows]


def _read_head(keys: Keys) -> Literal["tied", "untied"] | None:
    """A bare body (``LlamaModel``) was saved without a head."""
    tied = keys.flag("tie_word_embeddings")
    if read_architecture(keys, "ForCausalLM", "Model").endswith("Model"):
        return None
    return "tied" if tied else "untied"


def _token_id(keys: Keys, key: str) -> int | None:
    """Old files write -1 for "none"."""
    value = keys.whole(key, None)
    return None if value is None or value < 0 else value
