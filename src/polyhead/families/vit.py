"""ViT (Dosovitskiy et al. 2021): patches of an image in place of tokens."""

from __future__ import annotations

from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    LayerConfig,
    PatchConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes, read_network
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tasks import CLASSIFIER, ending, read_labels, write_labels
from polyhead.families.common.tensors import Rule, Tensors, under

_CLASSES = "ForImageClassification"


def read(keys: Keys) -> TransformerConfig:
    norm = read_layer_norm(keys)
    image, patch = _size(keys, "image_size"), _size(keys, "patch_size")
    frontend = PatchConfig(image, patch, keys.whole("num_channels"))
    sizes = read_mha_sizes(keys, max_positions=frontend.tokens)
    names = keys.take("architectures", None)
    found = ending(names)
    if found not in ("Model", _CLASSES):
        raise keys.refused("architectures", names, f"a class named ...Model or ...{_CLASSES}")
    dropout = keys.number("hidden_dropout_prob")
    attention = sizes.attention(
        qkv_bias=keys.flag("qkv_bias"),
        out_bias=True,
        dropout=keys.number("attention_probs_dropout_prob"),
    )
    network = read_network(keys, gated=False, bias=True)
    return TransformerConfig(
        kind="encoder",
        vocab_size=0,
        embed_dim=sizes.embed_dim,
        max_positions=frontend.tokens,
        layers=(LayerConfig(attention, network, norm, dropout=dropout),) * sizes.num_layers,
        embedding=EmbeddingConfig(positions="learned", frontend=frontend, dropout=dropout),
        final_norm=norm,
        head=None,
        task=TaskHeadConfig("first", **read_labels(keys)) if found == _CLASSES else None,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    frontend: Any = config.embedding.frontend
    attention: Any = config.layers[0].attention
    values: dict[str, Any] = {
        "image_size": _sides(frontend.image_size),
        "patch_size": _sides(frontend.patch_size),
        "num_channels": frontend.channels,
        "qkv_bias": attention.qkv_bias,
    }
    if config.task is None:
        return values
    return {"architectures": ["ViT" + _CLASSES], **values, **write_labels(config.task)}


def _size(keys: Keys, key: str) -> tuple[int, int]:
    """One number for a square, or height and width."""
    value = keys.take(key)
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise keys.refused(key, value, "a whole number, or height and width")
    return sides[0], sides[1]


def _sides(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else [*size]


BODY = (
    Rule("embeddings.cls_token", "embedding.frontend.class_token", Shaped((0, 1))),
    Rule("embeddings.position_embeddings", "embedding.positions.weight", Shaped((0,))),
    Rule("embeddings.patch_embeddings.projection", "embedding.frontend.projection"),
    Rule("layernorm", "final_norm"),
    *under(
        "encoder.layer.{i}.",
        "layers.{i}.",
        {
            "attention.attention.query": "attention.q_proj",
            "attention.attention.key": "attention.k_proj",
            "attention.attention.value": "attention.v_proj",
            "attention.output.dense": "attention.o_proj",
            "layernorm_before": "attention_norm",
            "intermediate.dense": "feed_forward.up_proj",
            "output.dense": "feed_forward.down_proj",
            "layernorm_after": "feed_forward_norm",
        },
    ),
)

FAMILIES = (
    Family(
        "vit",
        "ViT",
        read,
        Tensors(
            BODY,
            prefix="vit.",
            outside=(CLASSIFIER,),
            dropped={
                r"pooler\.dense\.(weight|bias)": "comes after the hidden states",
                r"embeddings\.mask_token": "stands for patches hidden in training",
            },
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "qkv_bias": True,
        },
        write=write,
        with_head=_CLASSES,
        # Keys of the pooler and of masked images, which are not built.
        harmless=frozenset(("pooler_output_size", "pooler_act", "encoder_stride")),
    ),
)
