"""A ``TransformerConfig`` written as config.json, where a Hugging Face family can say it.

No rule decides which family fits. Each is asked to write the configuration down, what it wrote is
read back, and the first that reads back as the same configuration is right: a file that would lose
a window or a bias is never written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyhead.checkpoints import deepseek, gemma
from polyhead.checkpoints.config_in import FAMILIES, Family, read_config
from polyhead.checkpoints.rope_out import stated_length, write_rope
from polyhead.checkpoints.shared_keys import (
    write_activation,
    write_decoder,
    write_layer_types,
    write_token_ids,
)
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError

_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "bert": "Bert",
}


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """config.json's object for a configuration.

    Raises:
        ConfigError: no supported family can say it; the message names what is lost.
    """
    losses: dict[str, list[str]] = {}
    bodies = _bodies(config)
    for model_type, family in FAMILIES.items():
        if family.body not in bodies:
            continue
        try:
            values: dict[str, Any] = json.loads(json.dumps(_written(config, model_type, family)))
            again = read_config(values, f"as {model_type}")
        except (ConfigError, AttributeError, KeyError, TypeError) as error:
            losses[model_type] = [str(error)]
            continue
        if again == config:
            return values
        losses[model_type] = _differences(config.to_dict(), again.to_dict())
    nearest = min(losses, key=lambda name: len(losses[name]), default=None)
    if nearest is None:
        raise ConfigError(f"no Hugging Face family that is supported has kind={config.kind!r}")
    raise ConfigError(
        f"this configuration cannot be written for Hugging Face: the nearest family, "
        f"{nearest!r}, cannot say {losses[nearest][0]}"
    )


def _bodies(config: TransformerConfig) -> tuple[str, ...]:
    """Which kinds of families could say it."""
    if config.kind == "encoder":
        return ("bert",)
    if isinstance(config.layers[0].attention, LatentAttentionConfig):
        return ("deepseek",)
    return ("decoder", "gemma")


def _written(config: TransformerConfig, model_type: str, family: Family) -> dict[str, Any]:
    if family.body == "gemma":
        return gemma.write(config, model_type, _CLASSES[model_type])
    if family.body == "deepseek":
        return deepseek.write(config, model_type, _CLASSES[model_type])
    write = _bert if family.body == "bert" else _decoder
    return write(config, model_type, family)


def _plain(config: TransformerConfig) -> tuple[AttentionConfig, FeedForwardConfig]:
    """Attention and network of the first layer, of which the others are copies but for windows."""
    attention, network = config.layers[0].attention, config.layers[0].feed_forward
    if not isinstance(attention, AttentionConfig):
        raise ConfigError(f"attention={attention}")
    if not isinstance(network, FeedForwardConfig):
        raise ConfigError(f"feed_forward={network}")
    return attention, network


def _decoder(config: TransformerConfig, model_type: str, family: Family) -> dict[str, Any]:
    attention, feed_forward = _plain(config)
    if attention.rope is None:
        raise ConfigError("rope=None")
    values: dict[str, Any] = {
        **write_decoder(config, _CLASSES[model_type], model_type),
        "intermediate_size": feed_forward.hidden_dim,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": write_activation(feed_forward.activation),
        "max_position_embeddings": stated_length(attention.rope, config.max_positions),
        **write_rope(attention.rope, attention.head_dim),
    }
    if family.biases == "key":
        values["attention_bias"] = attention.qkv_bias
    if family.ffn_bias:
        values["mlp_bias"] = feed_forward.bias
    windows = [getattr(layer.attention, "window", None) for layer in config.layers]
    if family.window == "every layer":
        values["sliding_window"] = windows[0]
    elif family.window == "by layer":
        window = next((found for found in windows if found is not None), None)
        values["use_sliding_window"] = window is not None
        values["sliding_window"] = window
        values["layer_types"] = write_layer_types(windows)
    return values


def _bert(config: TransformerConfig, model_type: str, family: Family) -> dict[str, Any]:
    attention, feed_forward = _plain(config)
    return {
        "architectures": [_CLASSES[model_type] + "Model"],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": feed_forward.hidden_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_heads,
        "hidden_act": write_activation(feed_forward.activation),
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.embedding.num_segments,
        "layer_norm_eps": config.layers[0].norm.eps,
        "hidden_dropout_prob": config.layers[0].dropout,
        "attention_probs_dropout_prob": attention.dropout,
        "position_embedding_type": "absolute",
        **write_token_ids(config),
    }


def _differences(wanted: Any, got: Any, at: str = "") -> list[str]:
    """The leaves in which two nested configurations differ, as ``path=value``."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return [
            found
            for key in wanted
            for found in _differences(wanted[key], got.get(key), f"{at}.{key}" if at else str(key))
        ]
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        if len(wanted) == len(got):
            return [
                found
                for i, (left, right) in enumerate(zip(wanted, got, strict=True))
                for found in _differences(left, right, f"{at}[{i}]")
            ]
        return [f"{at}={wanted!r}"]
    return [] if wanted == got else [f"{at}={wanted!r}"]
