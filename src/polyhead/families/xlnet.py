"""XLNet (Yang et al. 2019): an encoder whose scores depend on content by distance and on segments.

Read as a text is: one stream, without a permutation. The second stream, which predicts tokens from
their places alone in training and in transformers' generation, is not built, nor is a memory of
earlier segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    RelativeAttentionConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    UNLIMITED,
    divided,
    read_activation,
    read_layer_norm,
)
from polyhead.families.common.steps import At, OneToOne
from polyhead.families.common.tasks import (
    ANSWERS,
    LM_HEAD,
    QA,
    SEQUENCE,
    Heads,
    ending,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under

_ANSWERS = ANSWERS + "Simple"  # the other class searches for spans with networks of its own
_SUMMARY = {
    "summary_type": ("last",),
    "summary_use_proj": (True,),
    "summary_proj_to_labels": (None, False),
    "summary_activation": ("tanh",),
}


def read(keys: Keys) -> TransformerConfig:
    embed_dim, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim, norm = divided(keys, embed_dim, num_heads), read_layer_norm(keys)
    keys.expect("d_head", head_dim, None)
    keys.expect("attn_type", "bi")
    most, dropout = keys.whole("clamp_len"), keys.number("hidden_dropout_prob")
    if ending(keys.take("architectures", None)) == SEQUENCE:
        for key, allowed in _SUMMARY.items():
            keys.expect(key, *allowed)
    layer = LayerConfig(
        RelativeAttentionConfig(
            num_heads, num_heads, head_dim, dropout=dropout, max_distance=most if most > 0 else None
        ),
        FeedForwardConfig(
            keys.whole("intermediate_size"),
            read_activation(keys),
            gated=False,
            bias=True,
            dropout=dropout,
        ),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * keys.num_layers("num_hidden_layers"),
        max_positions=UNLIMITED,
        embedding=EmbeddingConfig(dropout=dropout),
        **read_head(
            keys,
            logits=LM_HEAD,
            pooled=(HeadTransformConfig(activation="tanh"),),
            pooling="last",
            own={_ANSWERS: TaskHeadConfig(None, 2, spans=True)},
            without=(ANSWERS,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    values = {
        "attn_type": "bi",
        "clamp_len": attention.max_distance or -1,
        "d_head": attention.head_dim,
        **write_head(config, "XLNet"),
    }
    if config.task is not None and config.task.spans:
        values["architectures"] = ["XLNet" + _ANSWERS]
    return values


@dataclass(frozen=True)
class HeadsLast(OneToOne):
    """Heads have a dimension of their own: ``[E, H, D]`` as the matrix ``[E, H · D]``.

    Attributes:
        transposed: Whether polyhead's matrix is ``[H · D, E]``.
    """

    transposed: bool = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        if tensor.ndim != 3:
            return tensor  # misshapen: reported by its name when the state is checked
        matrix = tensor.flatten(1)
        return matrix.mT if self.transposed else matrix

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        a = at.attention
        matrix = tensor.mT if self.transposed else tensor
        return matrix.reshape(-1, a.num_heads, a.head_dim)


_RULES = (
    Rule("word_embedding", "embedding.tokens"),
    *(
        Rule(f"layer.{{i}}.rel_attn.{theirs}", f"layers.{{i}}.attention.{ours}_proj.weight", step)
        for theirs, ours, step in (
            ("q", "q", HeadsLast()),
            ("k", "k", HeadsLast()),
            ("v", "v", HeadsLast()),
            ("r", "distance", HeadsLast()),
            ("o", "o", HeadsLast(transposed=False)),
        )
    ),
    *under(
        "layer.{i}.",
        "layers.{i}.",
        {
            "rel_attn.r_w_bias": "attention.content_bias",
            "rel_attn.r_r_bias": "attention.distance_bias",
            "rel_attn.r_s_bias": "attention.segment_bias",
            "rel_attn.seg_embed": "attention.segments",
            "rel_attn.layer_norm": "attention_norm",
            "ff.layer_1": "feed_forward.up_proj",
            "ff.layer_2": "feed_forward.down_proj",
            "ff.layer_norm": "feed_forward_norm",
        },
    ),
)
HEADS = Heads(
    "lm_loss",
    texts=(
        Rule("sequence_summary.summary", "task.transforms.0.dense"),
        Rule("logits_proj", "task.classifier"),
    ),
    own={_ANSWERS: (QA,)},
    others=r"lm_loss\..+",
    dropped={r"mask_emb": "enters the second stream alone"},
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, _RULES, "transformer.")


FAMILIES = (
    Family(
        "xlnet",
        "XLNet",
        read,
        table,
        defaults={
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "layer_norm_eps": 1e-12,
            "attn_type": "bi",
            "clamp_len": -1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 5,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "d_inner",
            "hidden_act": "ff_activation",
            "hidden_dropout_prob": "dropout",
        },
        write=write,
        with_head=LM_HEAD,
        not_supported={"bi_data": "the two halves of a batch are not read in opposite directions"},
        harmless=frozenset(
            (
                *_SUMMARY,
                "summary_last_dropout",
                "start_n_top",
                "end_n_top",
                # Memories of earlier segments are kept between calls alone.
                "mem_len",
                "reuse_len",
                "use_mems_eval",
                "use_mems_train",
                # Of memories under a causal mask.
                "same_length",
                # Every layer has biases of its own in the file, equal or not.
                "untie_r",
            )
        ),
    ),
)
