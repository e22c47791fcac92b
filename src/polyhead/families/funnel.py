"""Funnel-Transformer (Dai et al. 2020): an encoder whose blocks each read half as many tokens.

Its two types of attention compute the same. Classes of texts come from the blocks alone, others
from layers that read every token again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    FunnelAttentionConfig,
    FunnelConfig,
    HeadTransformConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import UNLIMITED, read_activation, read_layer_norm
from polyhead.families.common.steps import At, OneToOne
from polyhead.families.common.tasks import (
    MASKED,
    PRE_TRAINING,
    SEQUENCE,
    Heads,
    ending,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.xlnet import HeadsLast

_MOST = 1000


def read(keys: Keys) -> TransformerConfig:
    num_heads, norm = keys.size("num_attention_heads"), read_layer_norm(keys)
    keys.choice("attention_type", dict.fromkeys(("relative_shift", "factorized")))
    names = keys.take("architectures", None)
    if str(names).endswith("BaseModel']"):
        raise keys.refused("architectures", names, "FunnelModel, whose states are of all tokens")
    apart, dropout = keys.flag("separate_cls"), keys.number("hidden_dropout")
    decoder = keys.whole("num_decoder_layers")
    if not 0 <= decoder <= _MOST:
        raise keys.refused("num_decoder_layers", decoder, f"0 to {_MOST} layers")
    funnel = FunnelConfig(
        _read_blocks(keys),
        None if ending(names) == SEQUENCE else decoder,
        keys.choice("pooling_type", {"mean": "mean", "max": "max"}),
        apart,
        keys.flag("truncate_seq") and apart,
        keys.flag("pool_q_only"),
    )
    layer = LayerConfig(
        FunnelAttentionConfig(
            num_heads,
            num_heads,
            keys.size("d_head"),
            out_bias=True,
            dropout=keys.number("attention_dropout"),
        ),
        FeedForwardConfig(
            keys.whole("intermediate_size"),
            read_activation(keys),
            gated=False,
            bias=True,
            dropout=keys.number("activation_dropout"),
        ),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * len(funnel.strides),
        max_positions=UNLIMITED,
        embedding=EmbeddingConfig(norm=norm, dropout=dropout),
        funnel=funnel,
        **read_head(
            keys,
            pooled=(HeadTransformConfig(activation="tanh"),),
            without=(PRE_TRAINING,),
        ),
    )


def _read_blocks(keys: Keys) -> tuple[int, ...]:
    """Layers of each block."""
    sizes = keys.take("block_sizes")
    whole = isinstance(sizes, list | tuple) and all(type(each) is int for each in sizes)
    if not whole or not 0 < len(sizes) <= 32 or not 1 <= min(sizes) <= max(sizes) <= _MOST:
        raise keys.refused("block_sizes", sizes, f"1 to {_MOST} layers for each of 1 to 32 blocks")
    keys.expect("block_repeats", None, [1] * len(sizes), (1,) * len(sizes))
    return tuple(sizes)


def write(config: TransformerConfig) -> dict[str, Any]:
    funnel, layer = config.funnel, config.layers[0]
    heads: Any = layer.attention
    network: Any = layer.feed_forward
    if funnel is None:
        raise AttributeError("Funnel's layers are in blocks")
    return {
        "d_head": heads.head_dim,
        "block_sizes": [*funnel.blocks],
        "num_decoder_layers": 2 if funnel.decoder is None else funnel.decoder,
        "pooling_type": funnel.pooling,
        "attention_type": "relative_shift",
        "separate_cls": funnel.first_apart,
        "truncate_seq": funnel.truncate,
        "pool_q_only": funnel.queries_only,
        "hidden_dropout": layer.dropout,
        "activation_dropout": network.dropout,
        **write_head(config, "Funnel"),
    }


@dataclass(frozen=True)
class OtherFirst(OneToOne):
    """The vectors of segments, of which the file has that of other segments first."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flip(0)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flip(0)


_LAYER = {
    "attention.q_head": "attention.q_proj",
    "attention.k_head": "attention.k_proj",
    "attention.v_head": "attention.v_proj",
    "attention.post_proj": "attention.o_proj",
    "attention.r_w_bias": "attention.content_bias",
    "attention.r_r_bias": "attention.distance_bias",
    "attention.r_s_bias": "attention.segment_bias",
    "attention.layer_norm": "attention_norm",
    "ffn.linear_1": "feed_forward.up_proj",
    "ffn.linear_2": "feed_forward.down_proj",
    "ffn.layer_norm": "feed_forward_norm",
}
HEADS = Heads(
    "lm_head",
    texts=(
        Rule("classifier.linear_hidden", "task.transforms.0.dense"),
        Rule("classifier.linear_out", "task.classifier"),
    ),
    others=r"(lm_head|discriminator_predictions)\..+",
)


def table(values: Mapping[str, Any]) -> Tensors:
    keys = Keys({"block_sizes": (4, 4, 4), **values}, "config.json")
    sizes = _read_blocks(keys)
    without = ending(values.get("architectures")) == SEQUENCE
    count: int = 0 if without else values.get("num_decoder_layers", 2)
    places, at = [], 0
    for block, size in enumerate(sizes):
        places += [(f"encoder.blocks.{block}.{j}.", at + j) for j in range(size)]
        at += size
    places += [(f"decoder.layers.{j}.", at + j) for j in range(count)]
    rules = [
        Rule("embeddings.word_embeddings", "embedding.tokens"),
        Rule("embeddings.layer_norm", "embedding.norm"),
    ]
    for theirs, number in places:
        rules += under(theirs, f"layers.{number}.", _LAYER)
        ours = f"layers.{number}.attention."
        rules += (
            Rule(f"{theirs}attention.r_kernel", f"{ours}distance_proj.weight", HeadsLast()),
            Rule(f"{theirs}attention.seg_embed", f"{ours}segments", OtherFirst()),
        )
    return HEADS.table(values, tuple(rules), "funnel.")


FAMILIES = (
    Family(
        "funnel",
        "Funnel",
        read,
        table,
        defaults={
            "block_sizes": (4, 4, 4),
            "block_repeats": None,
            "num_decoder_layers": 2,
            "hidden_act": "gelu_new",
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.0,
            "layer_norm_eps": 1e-9,
            "pooling_type": "mean",
            "attention_type": "relative_shift",
            "separate_cls": True,
            "truncate_seq": True,
            "pool_q_only": True,
            "pad_token_id": None,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_head",
            "intermediate_size": "d_inner",
        },
        write=write,
        with_head=MASKED,
        harmless=frozenset(("initializer_std",)),
    ),
)
