"""ModernBERT (Warner et al. 2024): a rotary encoder with windows in two of three layers.

The first layer's attention reads the normed embedding as it is. Masked tokens and classes alike are
read from norm(activation(W x)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_activation,
    read_layer_norm,
    read_layer_types,
    read_mha_sizes,
)
from polyhead.families.common.rope import read_rope, write_ropes
from polyhead.families.common.steps import QKVRows, Rows
from polyhead.families.common.tasks import (
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    ending,
    masked_rules,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

_THETA: Mapping[str, float] = {FULL: 160_000.0, SLIDING: 10_000.0}
_OLD_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}


def read(keys: Keys) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    norm = read_layer_norm(keys, "norm_eps", bias=keys.flag("norm_bias"))
    biased, half = keys.flag("attention_bias"), keys.whole("local_attention") // 2
    if half < 1:
        raise keys.refused("local_attention", 2 * half, "at least 2 keys")
    ropes = _read_ropes(keys, sizes.head_dim, sizes.max_positions)
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")
    )
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=half + 1, window_ahead=half),
    }
    every = keys.whole("global_attn_every_n_layers", 3)
    if every < 1:
        raise keys.refused("global_attn_every_n_layers", every, "at least 1 layer")
    default = [SLIDING if i % every else FULL for i in range(sizes.num_layers)]
    network = FeedForwardConfig(
        keys.whole("intermediate_size"),
        read_activation(keys, "hidden_activation"),
        bias=keys.flag("mlp_bias"),
        dropout=keys.number("mlp_dropout"),
    )
    transform = HeadTransformConfig(
        None, read_activation(keys, "classifier_activation"), keys.flag("classifier_bias"), norm
    )
    return read_encoder(
        keys,
        tuple(
            LayerConfig(of_kind[kind], network, norm, attention_norm=i > 0)
            for i, kind in enumerate(read_layer_types(keys, sizes.num_layers, default))
        ),
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(norm=norm, dropout=keys.number("embedding_dropout")),
        final_norm=norm,
        **read_head(
            keys,
            transform,
            head_bias=keys.flag("decoder_bias"),
            pooled=(transform,),
            each=(transform,),
            pooling=keys.choice("classifier_pooling", {"cls": "first", "mean": "mean"}),
            without=(PRE_TRAINING,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    network: Any = config.layers[0].feed_forward
    norm, task = config.final_norm, config.task
    transforms = task.transforms if task is not None else (config.head_transform,)
    transform = transforms[0] or HeadTransformConfig(None, "gelu", bias=False)
    ahead = next(
        (each.window_ahead for each in layers if each.window), DEFAULTS["local_attention"] // 2
    )
    ropes = {FULL if each.window is None else SLIDING: each.rope for each in layers}
    return {
        "norm_eps": norm.eps if norm else None,
        "norm_bias": bool(norm and norm.bias),
        "local_attention": 2 * ahead,
        "hidden_activation": write_activation(network.activation),
        "mlp_dropout": network.dropout,
        "embedding_dropout": config.embedding.dropout,
        "classifier_activation": write_activation(transform.activation or ""),
        "classifier_bias": transform.bias,
        "classifier_pooling": "mean" if task is not None and task.pooling == "mean" else "cls",
        "decoder_bias": config.head_bias or config.head is None,
        **write_ropes({kind: ropes.get(kind) or RopeConfig(_THETA[kind]) for kind in _THETA}),
        **write_head(config, "ModernBert"),
    }


def _read_ropes(keys: Keys, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer, in both spellings."""
    values = keys.take("rope_parameters", None)
    scaling = keys.take("rope_scaling", None)
    thetas = {kind: keys.number(_OLD_THETA[kind], theta) for kind, theta in _THETA.items()}
    if values is None:
        values = {}
    if not isinstance(values, Mapping) or values.keys() - thetas:
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(thetas)}")
    if values and scaling:
        raise keys.refused("rope_scaling", scaling, "only one of rope_parameters and rope_scaling")
    ropes = {}
    for kind, theta in thetas.items():
        inner = values.get(kind) or scaling or {}
        if not isinstance(inner, Mapping):
            raise keys.refused(f"rope_parameters.{kind}", inner, "an object")
        one = Keys({"rope_parameters": {"rope_theta": theta, **inner}}, f"{keys.where}: {kind}")
        ropes[kind] = read_rope(one, head_dim, max_positions)
    return ropes


_Q, _K, _V = (f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
RULES = (
    Rule("embeddings.tok_embeddings", "embedding.tokens"),
    Rule("embeddings.norm", "embedding.norm"),
    Rule("final_norm", "final_norm"),
    Rule("layers.{i}.attn.Wqkv", (_Q, _K, _V), QKVRows()),
    Rule(
        "layers.{i}.mlp.Wi",
        ("layers.{i}.feed_forward.gate_proj", "layers.{i}.feed_forward.up_proj"),
        Rows(),
    ),
    *under(
        "layers.{i}.",
        "layers.{i}.",
        {
            "attn_norm": "attention_norm",
            "attn.Wo": "attention.o_proj",
            "mlp_norm": "feed_forward_norm",
            "mlp.Wo": "feed_forward.down_proj",
        },
    ),
)


def table(values: Mapping[str, Any]) -> Tensors:
    """The tensor table, by the head of the class in config.json."""
    found, dropped = ending(values.get("architectures")), {}
    place = "head.transform" if found == MASKED else "task.transforms.0"
    outside = [*under("head.", place + ".", {"dense": "dense", "norm": "norm"})]
    outside += masked_rules(values, "decoder") if found == MASKED else [CLASSIFIER]
    if found == "Model":
        dropped = {r"(head|decoder)\..+": "comes after the hidden states"}
    return Tensors(RULES, outside=tuple(outside), dropped=dropped)


DEFAULTS: Mapping[str, Any] = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "local_attention": 128,
    "embedding_dropout": 0.0,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "decoder_bias": True,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "pad_token_id": 50_283,
    "eos_token_id": 50_282,
    "bos_token_id": 50_281,
    "tie_word_embeddings": True,
}

FAMILIES = (
    Family(
        "modernbert",
        "ModernBert",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        harmless=frozenset(
            (
                "initializer_cutoff_factor",
                "deterministic_flash_attn",
                "sparse_prediction",
                "sparse_pred_ignore_index",
                "reference_compile",
                "repad_logits_with_grad",
                # Without effect in the first version's files: norm_eps counted and positions were
                # rotary.
                "layer_norm_eps",
                "position_embedding_type",
            )
        ),
    ),
)
