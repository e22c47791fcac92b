"""DeBERTa-v2 and v3 (He et al. 2021): far distances share vectors, and layers their projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import ConvolutionConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import ACTIVATIONS, read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import MASKED
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation
from polyhead.families.deberta import DEFAULTS, HARMLESS, read_with, table_of, write_with


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("attention_head_size", sizes.head_dim)
    normed = keys.text("norm_rel_ebd", "none").lower().split("|")
    config = read_with(
        keys,
        sizes,
        norm,
        buckets=keys.whole("position_buckets", -1),
        norm_of_distances=norm if "layer_norm" in {x.strip() for x in normed} else None,
        own_projections=not keys.flag("share_att_key", False),
    )
    width, groups = keys.whole("conv_kernel_size", 0), keys.whole("conv_groups", 1)
    activation = keys.choice("conv_act", ACTIVATIONS, "tanh")
    if width < 1:
        return config
    first = replace(config.layers[0], convolution=ConvolutionConfig(width, groups, activation))
    return replace(config, layers=(first, *config.layers[1:]))


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: Any = config.layers[0].attention
    distances = config.relative_embedding
    values = write_with(config, "DebertaV2")
    if (beside := config.layers[0].convolution) is not None:
        values |= {
            "conv_kernel_size": beside.width,
            "conv_groups": beside.groups,
            "conv_act": write_activation(beside.activation),
        }
    if distances is None:
        return values
    return values | {
        "position_buckets": distances.num_distances // 2 if distances.max_distance else -1,
        "norm_rel_ebd": "none" if distances.norm is None else "layer_norm",
        "share_att_key": not heads.own_projections,
    }


def table(values: Mapping[str, Any]) -> Tensors:
    heads = under(
        "encoder.layer.{i}.attention.self.",
        "layers.{i}.attention.",
        {
            "query_proj": "q_proj",
            "key_proj": "k_proj",
            "value_proj": "v_proj",
            "pos_key_proj": "distance_k_proj",
            "pos_query_proj": "distance_q_proj",
        },
    )
    return table_of(
        values,
        *heads,
        Rule("encoder.LayerNorm", "relative_embedding.norm"),
        Rule("encoder.conv.conv", "layers.0.convolution.conv"),
        Rule("encoder.conv.LayerNorm", "layers.0.convolution.norm"),
    )


FAMILIES = (
    Family(
        "deberta-v2",
        "DebertaV2",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        harmless=HARMLESS,
    ),
)
