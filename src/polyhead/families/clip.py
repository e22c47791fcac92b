"""CLIP's text encoder (Radford et al. 2021): an encoder with a causal mask.

``CLIPTextModelWithProjection`` gives a vector for each text: the state of the token that ends it,
projected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    LayerConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_layer_norm,
    read_mha_sizes,
    read_network,
    read_token_ids,
)
from polyhead.families.common.tasks import ending
from polyhead.families.common.tensors import Rule, Tensors, under

_PROJECTED = "ModelWithProjection"
_OLD_END = 2  # all files before 2023 have this value; it means the vocabulary's last token


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    names, ids = keys.take("architectures", None), read_token_ids(keys)
    found = ending(names)
    if found not in ("Model", _PROJECTED):
        raise keys.refused("architectures", names, f"a class named ...Model or ...{_PROJECTED}")
    vocab_size, projected = keys.whole("vocab_size"), keys.whole("projection_dim", None)
    task = None
    if found == _PROJECTED:
        if projected is None:
            raise keys.refused("projection_dim", projected, "a number of features")
        if len(ids["eos_token_ids"]) != 1:
            raise keys.refused(
                "eos_token_id", [*ids["eos_token_ids"]], "one token that ends a text"
            )
        if ids["eos_token_ids"] == (_OLD_END,):
            ids["eos_token_ids"] = (vocab_size - 1,)
        task = TaskHeadConfig("end", transforms=(HeadTransformConfig(projected, bias=False),))
    attention = sizes.attention(
        qkv_bias=True,
        out_bias=True,
        dropout=keys.number("attention_dropout"),
        window=sizes.max_positions,
        window_ahead=0,
    )
    layer = LayerConfig(attention, read_network(keys, gated=False, bias=True), norm)
    return TransformerConfig(
        kind="encoder",
        vocab_size=vocab_size,
        embed_dim=sizes.embed_dim,
        max_positions=sizes.max_positions,
        layers=(layer,) * sizes.num_layers,
        embedding=EmbeddingConfig(positions="learned"),
        final_norm=norm,
        head=None,
        task=task,
        **ids,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    if config.task is None:
        return {}
    return {
        "architectures": ["CLIPText" + _PROJECTED],
        "projection_dim": config.task.transforms[0].dim,
    }


BODY = (
    *under(
        "embeddings.",
        "embedding.",
        {"token_embedding": "tokens", "position_embedding": "positions"},
    ),
    Rule("final_layer_norm", "final_norm"),
    *under(
        "encoder.layers.{i}.",
        "layers.{i}.",
        {
            "self_attn.q_proj": "attention.q_proj",
            "self_attn.k_proj": "attention.k_proj",
            "self_attn.v_proj": "attention.v_proj",
            "self_attn.out_proj": "attention.o_proj",
            "layer_norm1": "attention_norm",
            "mlp.fc1": "feed_forward.up_proj",
            "mlp.fc2": "feed_forward.down_proj",
            "layer_norm2": "feed_forward_norm",
        },
    ),
)


def table(values: Mapping[str, Any]) -> Tensors:
    """Older files and those with a projection have the prefix, the body alone is written bare."""
    projection = Rule("text_projection", "task.transforms.0.dense")
    return Tensors(
        BODY,
        prefix="text_model.",
        outside=(projection,),
        dropped={r"embeddings\.position_ids": "0, 1, 2, ..."},
    )


FAMILIES = (
    Family(
        "clip_text_model",
        "CLIPText",
        read,
        table,
        defaults={
            "projection_dim": 512,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "pad_token_id": 1,
            "bos_token_id": 49_406,
            "eos_token_id": 49_407,
        },
        write=write,
        with_head=_PROJECTED,
    ),
)
