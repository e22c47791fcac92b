"""ConvBERT (Jiang et al. 2020): ELECTRA with convolutions beside its heads.

In a batch padding counts as zeros beside a text, so that a text has the result that it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from polyhead.config import (
    ConvolvedHeadsConfig,
    EmbeddingProjectionConfig,
    GroupedFeedForwardConfig,
    HeadTransformConfig,
    TransformerConfig,
)
from polyhead.families import bert, electra
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.steps import At, OneToOne, Shaped
from polyhead.families.common.tasks import MASKED, PRE_TRAINING, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    ratio, width = keys.size("head_ratio"), keys.size("conv_kernel_size")
    num_heads = max(sizes.num_heads // ratio, 1)
    if sizes.embed_dim % (2 * num_heads):
        raise keys.refused("head_ratio", ratio, "one that leaves heads and convolutions of a size")
    if width % 2 == 0:
        raise keys.refused("conv_kernel_size", width, "an odd number")
    heads = ConvolvedHeadsConfig(
        num_heads,
        num_heads,
        sizes.embed_dim // (2 * num_heads),
        qkv_bias=True,
        out_bias=True,
        dropout=keys.number("attention_probs_dropout_prob"),
        width=width,
    )
    size, groups, activation = (
        keys.size("embedding_size"), keys.size("num_groups"), read_activation(keys)
    )  # fmt: skip
    layer = replace(bert.read_layers(keys, sizes, norm)[0], attention=heads)
    network: Any = layer.feed_forward
    if groups > 1:
        given = {each.name: getattr(network, each.name) for each in fields(network)}
        network = GroupedFeedForwardConfig(**given, up_groups=groups, down_groups=groups)
        if sizes.embed_dim % groups:
            raise keys.refused("num_groups", groups, f"a divisor of {sizes.embed_dim}")
    projection = None if size == sizes.embed_dim else EmbeddingProjectionConfig(size)
    return bert.read_encoder(
        keys,
        (replace(layer, feed_forward=network),) * sizes.num_layers,
        max_positions=sizes.max_positions,
        embedding=bert.read_embedding(keys, norm, projection=projection),
        **read_head(
            keys,
            HeadTransformConfig(size, "gelu", norm=norm),
            pooled=(HeadTransformConfig(activation=activation),),
            without=(PRE_TRAINING,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: Any = config.layers[0].attention
    projection = config.embedding.projection
    return {
        "embedding_size": config.embed_dim if projection is None else projection.dim,
        "num_attention_heads": 2 * heads.num_heads,
        "head_ratio": 2,
        "conv_kernel_size": heads.width,
        "num_groups": getattr(config.layers[0].feed_forward, "up_groups", 1),
        **write_head(config, "ConvBert"),
    }


@dataclass(frozen=True)
class Groups(OneToOne):
    """Matrices ``[groups, in, out]`` of a grouped projection as ``[groups · out, in]``."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.mT.flatten(0, 1) if tensor.ndim == 3 else tensor

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        groups = getattr(at.layer.feed_forward, "up_groups", 1)
        if tensor.ndim == 1 or groups == 1:
            return tensor
        return tensor.reshape(groups, -1, tensor.shape[1]).mT.contiguous()


_CONVOLVED = (
    *under(
        "encoder.layer.{i}.attention.self.",
        "layers.{i}.attention.",
        {
            "key_conv_attn_layer.depthwise": "depthwise",
            "conv_kernel_layer": "weights_proj",
            "conv_out_layer": "convolved_proj",
        },
    ),
    Rule(
        "encoder.layer.{i}.attention.self.key_conv_attn_layer.pointwise.weight",
        "layers.{i}.attention.pointwise.weight",
        Shaped((2,)),
    ),
    Rule(
        "encoder.layer.{i}.attention.self.key_conv_attn_layer.bias",
        "layers.{i}.attention.pointwise.bias",
        Shaped((1,)),
    ),
)
_GROUPED = ("intermediate.dense", "output.dense")
_LAYERS = tuple(
    rule.with_(rule.theirs, Groups())
    if rule.theirs.endswith(_GROUPED) and "attention" not in rule.theirs
    else rule
    for rule in bert.LAYERS
)


def table(values: Mapping[str, Any]) -> Tensors:
    project = Rule("embeddings_project", "embedding.projection")
    rules = (*bert.EMBEDDINGS, project, *_CONVOLVED, *_LAYERS)
    return electra.HEADS.table(values, rules, "convbert.")


FAMILIES = (
    Family(
        "convbert",
        "ConvBert",
        read,
        table,
        defaults={
            **bert.DEFAULTS,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "embedding_size": 768,
            "head_ratio": 2,
            "conv_kernel_size": 9,
            "num_groups": 1,
        },
        write=write,
        with_head=MASKED,
        not_supported=bert.ONLY_ENCODER,
    ),
)
