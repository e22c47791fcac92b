"""A ``TransformerConfig`` written as config.json, where a Hugging Face family can say it.

No rule decides which family fits. Each is asked to write the configuration down, what it wrote is
read back, and the first that reads back as the same configuration is right: a file that would lose
a window or a bias is never written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyhead.checkpoints.config_in import ACTIVATIONS, FAMILIES, Family, read_config
from polyhead.checkpoints.rope_in import ROPE_FIELDS
from polyhead.errors import ConfigError
from polyhead.models.config import RopeConfig, TransformerConfig

_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "bert": "Bert",
}


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """config.json's object for a configuration.

    Raises:
        ConfigError: no supported family can say it; the message names what is lost.
    """
    losses: dict[str, list[str]] = {}
    for model_type, family in FAMILIES.items():
        if (family.body == "bert") != (config.kind == "encoder"):
            continue
        write = _bert if family.body == "bert" else _decoder
        try:
            values: dict[str, Any] = json.loads(json.dumps(write(config, model_type, family)))
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


def _decoder(config: TransformerConfig, model_type: str, family: Family) -> dict[str, Any]:
    first = config.layers[0]
    attention, feed_forward = first.attention, first.feed_forward
    if attention.rope is None:
        raise ConfigError("rope=None")
    values: dict[str, Any] = {
        "architectures": [_CLASSES[model_type] + ("ForCausalLM" if config.head else "Model")],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": feed_forward.hidden_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": _activation(feed_forward.activation),
        "max_position_embeddings": _stated_length(attention.rope, config.max_positions),
        "rms_norm_eps": first.norm.eps,
        "tie_word_embeddings": config.head == "tied",
        "attention_dropout": attention.dropout,
        **_rope(attention.rope, attention.head_dim),
        **_token_ids(config),
    }
    if family.biases == "key":
        values["attention_bias"] = attention.qkv_bias
    if family.ffn_bias:
        values["mlp_bias"] = feed_forward.bias
    windows = [layer.attention.window for layer in config.layers]
    if family.window == "every layer":
        values["sliding_window"] = windows[0]
    elif family.window == "by layer":
        window = next((found for found in windows if found is not None), None)
        values["use_sliding_window"] = window is not None
        values["sliding_window"] = window
        values["layer_types"] = [
            "full_attention" if found is None else "sliding_attention" for found in windows
        ]
    return values


def _bert(config: TransformerConfig, model_type: str, family: Family) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "architectures": [_CLASSES[model_type] + "Model"],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": first.feed_forward.hidden_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": first.attention.num_heads,
        "hidden_act": _activation(first.feed_forward.activation),
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.embedding.num_segments,
        "layer_norm_eps": first.norm.eps,
        "hidden_dropout_prob": first.dropout,
        "attention_probs_dropout_prob": first.attention.dropout,
        "position_embedding_type": "absolute",
        **_token_ids(config),
    }


def _rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """In the older spelling, which every version of transformers reads."""
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim is not None:
        values["partial_rotary_factor"] = rope.dim / head_dim
    if rope.type != "default":
        fields = {theirs: getattr(rope, ours) for theirs, ours in ROPE_FIELDS.items()}
        if rope.type == "dynamic":  # starts from max_position_embeddings
            del fields["original_max_position_embeddings"]
        if rope.truncate:
            del fields["truncate"]
        present = {key: value for key, value in fields.items() if value is not None}
        values["rope_scaling"] = {"rope_type": rope.type} | present
    return values


def _stated_length(rope: RopeConfig, max_positions: int) -> int:
    """The inverse of ``rope_in.reach``."""
    if rope.type in ("linear", "dynamic"):
        return round(max_positions / (rope.factor or 1.0))
    return max_positions


def _token_ids(config: TransformerConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
    }


def _activation(ours: str) -> str:
    return next(theirs for theirs, known in ACTIVATIONS.items() if known == ours)


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
