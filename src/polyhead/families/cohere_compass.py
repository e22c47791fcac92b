"""The text model of North Micro Vision (Cohere's Compass, 2026): Command R7B's parallel layers.

Each kind of layer says for itself how it rotates, if it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.families.cohere import DEFAULTS, NORM, write_second
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import windowed
from polyhead.families.common.reading import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    read_decoder,
    read_layer_norm,
    read_layer_types,
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes, stated_length, write_ropes
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK
from polyhead.families.common.tensors import Tensors


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys, own_head_dim=False), read_layer_norm(keys, bias=False)
    keys.expect("head_dim", sizes.head_dim)
    count, biased = sizes.num_layers, keys.flag("attention_bias")
    kinds = read_layer_types(keys, count, [FULL] * count)
    stated = keys.take("rope_parameters")
    if not isinstance(stated, Mapping) or not {*kinds} <= stated.keys():
        raise keys.refused("rope_parameters", stated, f"an object with {' and '.join({*kinds})}")
    # Published files have these beside the kinds of layers, where they say nothing.
    stated = {key: value for key, value in stated.items() if key not in ("rope_theta", "rope_type")}
    ropes = read_ropes(
        Keys({"rope_parameters": stated}, keys.where),
        sizes.head_dim,
        sizes.max_positions,
        dict.fromkeys(LAYER_TYPES),
        interleaved_sections=True,
    )
    for rope in ropes.values():
        if rope.type in ("dynamic", "longrope"):
            raise keys.refused("rope_parameters", rope.type, "a type that no length changes")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=ropes.get(SLIDING),
        dropout=keys.number("attention_dropout"),
    )
    network = read_network(keys)
    attentions = windowed(keys, attention, count, kinds, rope=ropes.get(FULL))
    far = ropes.get(FULL) or ropes.get(SLIDING)
    return read_decoder(
        keys,
        [LayerConfig(each, network, norm, parallel="one norm") for each in attentions],
        max_positions=reach(far, sizes.max_positions) if far else sizes.max_positions,
        norm=norm,
        logit_scale=keys.number("logit_scale", 1.0),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    ropes = {SLIDING if each.window else FULL: each.rope for each in attentions}
    far, length = ropes.get(FULL) or ropes.get(SLIDING), config.max_positions
    return {
        **write_second(config),
        **write_ropes(ropes),
        "max_position_embeddings": stated_length(far, length) if far else length,
    }


FAMILIES = (
    Family(
        "cohere_compass_text",
        "CohereCompass",
        read,
        Tensors((*AROUND_LAYERS, NORM, *ATTENTION, *NETWORK)),
        defaults={**DEFAULTS, "sliding_window": 4096, "logit_scale": None},
        write=write,
        harmless=frozenset(("pooling", "sliding_window_pattern", "_sliding_window_pattern")),
        bare="TextModel",
    ),
)
