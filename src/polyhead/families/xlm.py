"""XLM (Lample & Conneau 2019) and FlauBERT (Le et al. 2020): BERT's layers, with languages in place
of segments. A call without languages adds none. Models with ``causal`` are decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    ANSWERS,
    LM_HEAD,
    QA,
    SEQUENCE,
    TOKENS,
    Heads,
    ending,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under

_ANSWERS = ANSWERS + "Simple"  # the other class searches for spans with networks of its own
_SUMMARY = {
    "summary_type": ("first",),
    "summary_use_proj": (True,),
    "summary_proj_to_labels": (True,),
    "summary_activation": (None,),
}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    causal, dropout = keys.flag("causal"), keys.number("hidden_dropout_prob")
    keys.expect("is_encoder", True)
    languages, used = keys.size("n_langs"), keys.flag("use_lang_emb")
    count = languages if used and languages > 1 else 0
    if ending(keys.take("architectures", None)) == SEQUENCE:
        for key, allowed in _SUMMARY.items():
            keys.expect(key, *allowed)
    layer = LayerConfig(
        sizes.attention(qkv_bias=True, out_bias=True, dropout=keys.number("attention_dropout")),
        FeedForwardConfig(
            4 * sizes.embed_dim,
            "gelu" if keys.flag("gelu_activation") else "relu",
            gated=False,
            bias=True,
        ),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        kind="decoder" if causal else "encoder",
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            positions="learned",
            num_segments=count,
            segments_optional=count > 0,
            norm=norm,
            dropout=dropout,
        ),
        **read_head(
            keys,
            logits=LM_HEAD,
            own={} if causal else {_ANSWERS: TaskHeadConfig(None, 2, spans=True)},
            without=(SEQUENCE, TOKENS, ANSWERS) if causal else (ANSWERS,),
        ),
    )


def write(class_name: str, config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    count, task = config.embedding.num_segments, config.task
    values = {
        "causal": config.kind == "decoder",
        "n_langs": count or 1,
        "use_lang_emb": count > 0,
        "gelu_activation": network.activation == "gelu",
        "dropout": config.embedding.dropout,
        **write_head(config, class_name),
    }
    if task is not None and task.spans:
        values["architectures"] = [class_name + _ANSWERS]
    return values


RULES = (
    Rule("embeddings", "embedding.tokens"),
    Rule("position_embeddings", "embedding.positions"),
    Rule("lang_embeddings", "embedding.segments"),
    Rule("layer_norm_emb", "embedding.norm"),
    *under(
        "",
        "layers.{i}.",
        {
            "attentions.{i}.q_lin": "attention.q_proj",
            "attentions.{i}.k_lin": "attention.k_proj",
            "attentions.{i}.v_lin": "attention.v_proj",
            "attentions.{i}.out_lin": "attention.o_proj",
            "layer_norm1.{i}": "attention_norm",
            "ffns.{i}.lin1": "feed_forward.up_proj",
            "ffns.{i}.lin2": "feed_forward.down_proj",
            "layer_norm2.{i}": "feed_forward_norm",
        },
    ),
)
HEADS = Heads(
    "pred_layer.proj",
    texts=(Rule("sequence_summary.summary", "task.classifier"),),
    own={_ANSWERS: (QA,)},
    others=r"pred_layer\..+",
    dropped={r"position_ids": "0, 1, 2, ..."},
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, RULES, "transformer.")


DEFAULTS: Mapping[str, Any] = {
    "hidden_dropout_prob": 0.1,
    "attention_dropout": 0.1,
    "gelu_activation": True,
    "causal": False,
    "n_langs": 1,
    "use_lang_emb": True,
    "layer_norm_eps": 1e-12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
NOT_SUPPORTED = {"asm": "logits of an adaptive softmax are not built"}
HARMLESS = frozenset(
    (
        # A table of positions is read, whatever it began as.
        "sinusoidal_embeddings",
        *_SUMMARY,
        "summary_first_dropout",
        "start_n_top",
        "end_n_top",
        "embed_init_std",
        "layerdrop",
        # Of the tokenizer and of the search.
        "lang_id",
        "lang2id",
        "id2lang",
        "unk_index",
        "mask_index",
        "share_inout_emb",
    )
)


def sister(model_type: str, class_name: str, **not_supported: str) -> Family:
    """A family with XLM's keys and names."""
    return Family(
        model_type,
        class_name,
        read,
        table,
        defaults=DEFAULTS,
        aliases={
            "vocab_size": "n_words",
            "hidden_size": "emb_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_dropout_prob": "dropout",
            "bos_token_id": "bos_index",
            "eos_token_id": "eos_index",
            "pad_token_id": "pad_index",
        },
        write=partial(write, class_name),
        with_head="With" + LM_HEAD,
        initial_key="init_std",
        not_supported=NOT_SUPPORTED | not_supported,
        harmless=HARMLESS,
    )


FAMILIES = (
    sister("xlm", "XLM"),
    sister(
        "flaubert",
        "Flaubert",
        pre_norm="norms before attention and network, with which transformers' own class fails",
    ),
)
