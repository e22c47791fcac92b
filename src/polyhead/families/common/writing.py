"""A configuration in the keys of config.json that families share.

What is written here is everything that the shared keys can say, whether or not a family has them:
``config_json.write_config`` keeps those that the family reads, adds what the family writes itself,
and reads it back, so a key too many or too few is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.reading import ACTIVATIONS, FULL, SLIDING
from polyhead.families.common.rope import stated_length, write_rope


def write_common(config: TransformerConfig) -> dict[str, Any]:
    """The shared keys: from the model, its first layer, and the first that keeps keys, rotates them
    or has a network.
    """
    layer = config.layers[0]
    found: list[Any] = [each.attention for each in config.layers]
    keeping = (a for a in found if any(memory.keys_and_values for memory in a.memories))
    attention = next(keeping, found[0])
    networks = (each.feed_forward for each in config.layers)
    network: Any = next((each for each in networks if each is not None), None)
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": getattr(attention, "num_kv_heads", attention.num_heads),
        "head_dim": getattr(attention, "head_dim", None),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.head == "tied",
        "rms_norm_eps": layer.norm.eps,
        "layer_norm_eps": layer.norm.eps,
        "attention_bias": getattr(attention, "qkv_bias", getattr(attention, "bias", False)),
        "attention_dropout": attention.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_dropout_prob": layer.dropout,
        "type_vocab_size": config.embedding.num_segments,
        **write_token_ids(config),
    }
    turned = next((each for each in found if each.rope is not None), None)
    if turned is not None:
        values |= write_rope(turned.rope, turned.rope_head_dim)
        values["max_position_embeddings"] = stated_length(turned.rope, config.max_positions)
    windows = [getattr(each.attention, "window", None) for each in config.layers]
    window = next((found for found in windows if found is not None), None)
    values |= {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": write_layer_types(windows),
    }
    if network is None:
        return values
    network = getattr(network, "dense", network)
    dense = network.shared or network.expert if hasattr(network, "expert") else network
    return values | {
        "intermediate_size": dense.hidden_dim,
        "hidden_act": write_activation(dense.activation),
        "mlp_bias": dense.bias,
        **(write_mixture(network) if hasattr(network, "expert") else {}),
    }


def write_mixture(mixture: Any) -> dict[str, Any]:
    """The shared keys of a mixture of experts."""
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "norm_topk_prob": mixture.normalize,
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
