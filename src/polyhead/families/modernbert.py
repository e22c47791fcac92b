"""ModernBERT (Warner et al. 2024): a rotary encoder with windows in two of three layers.

The first layer's attention reads the normed embedding as it is. Masked tokens and classes alike are
read from norm(activation(W x)). The decoder (Ettin, Weller et al. 2025) is the same but causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    RopeConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_activation,
    read_layer_norm,
    read_layer_types,
    read_mha_sizes,
)
from polyhead.families.common.reading import (
    read_head as read_language_head,
)
from polyhead.families.common.rope import read_rope, write_ropes
from polyhead.families.common.steps import QKVRows, Rows
from polyhead.families.common.tasks import (
    BARE,
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    SEQUENCE,
    ending,
    masked_rules,
    read_head,
    read_labels,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

_THETA: Mapping[str, float] = {FULL: 160_000.0, SLIDING: 10_000.0}
_OLD_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}


def read(keys: Keys, *, causal: bool = False) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    norm = read_layer_norm(keys, "norm_eps", bias=keys.flag("norm_bias"))
    biased, half = keys.flag("attention_bias"), keys.whole("local_attention") // 2
    if half < 1:
        raise keys.refused("local_attention", 2 * half, "at least 2 keys")
    ropes = _read_ropes(keys, sizes.head_dim, sizes.max_positions)
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")
    )
    window, ahead = (half, None) if causal else (half + 1, half)
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=window, window_ahead=ahead),
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
        **(_read_causal_head if causal else _read_head)(keys, transform),
    )


def _read_head(keys: Keys, transform: HeadTransformConfig) -> dict[str, Any]:
    return read_head(
        keys,
        transform,
        head_bias=keys.flag("decoder_bias"),
        pooled=(transform,),
        each=(transform,),
        pooling=keys.choice("classifier_pooling", {"cls": "first", "mean": "mean"}),
        without=(PRE_TRAINING,),
    )


def _read_causal_head(keys: Keys, transform: HeadTransformConfig) -> dict[str, Any]:
    """Logits of the next token, or classes of the last token."""
    biased, named = keys.flag("decoder_bias"), keys.take("architectures", None)
    kind: dict[str, Any] = {"kind": "decoder"}
    if named and ending(named) == SEQUENCE:
        keys.flag("tie_word_embeddings")
        labels = read_labels(keys)
        task = TaskHeadConfig("last", transforms=(transform,), bias=transform.bias, **labels)
        return kind | {"head": None, "task": task}
    head = read_language_head(keys)
    if head is None:
        return kind | {"head": None}
    return kind | {"head": head, "head_bias": biased, "head_transforms": (transform,)}


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    network: Any = config.layers[0].feed_forward
    norm, task = config.final_norm, config.task
    transforms = config.head_transforms if task is None else task.transforms
    transform = next(iter(transforms), HeadTransformConfig(None, "gelu", bias=False))
    causal = config.kind == "decoder"
    half = next(
        (each.window if causal else each.window_ahead for each in layers if each.window),
        DEFAULTS["local_attention"] // 2,
    )
    pooling = "mean" if task is not None and task.pooling == "mean" else "cls"
    ropes = {FULL if each.window is None else SLIDING: each.rope for each in layers}
    return {
        "norm_eps": norm.eps if norm else None,
        "norm_bias": bool(norm and norm.bias),
        "local_attention": 2 * half,
        "hidden_activation": write_activation(network.activation),
        "mlp_dropout": network.dropout,
        "embedding_dropout": config.embedding.dropout,
        "classifier_activation": write_activation(transform.activation or ""),
        "classifier_bias": transform.bias,
        **({} if causal else {"classifier_pooling": pooling}),
        "decoder_bias": config.head_bias or config.head is None,
        **write_ropes({kind: ropes.get(kind) or RopeConfig(_THETA[kind]) for kind in _THETA}),
        **write_head(config, "ModernBertDecoder" if causal else "ModernBert"),
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
_JOINED = (Rule("layers.{i}.attn.Wqkv", (_Q, _K, _V), QKVRows()),)
_APART = under(
    "layers.{i}.attn.", "layers.{i}.attention.", {f"{n}_proj": f"{n}_proj" for n in "qkv"}
)
RULES = (
    Rule("embeddings.tok_embeddings", "embedding.tokens"),
    Rule("embeddings.norm", "embedding.norm"),
    Rule("final_norm", "final_norm"),
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
    place = "head.transforms.0" if found == MASKED else "task.transforms.0"
    outside = [*under("head.", place + ".", {"dense": "dense", "norm": "norm"})]
    outside += masked_rules(values, "decoder") if found == MASKED else [CLASSIFIER]
    if found == "Model":
        dropped = {r"(head|decoder|cls)\..+": "comes after the hidden states"}
    return Tensors((*RULES, *_JOINED), outside=tuple(outside), dropped=dropped)


def causal_table(values: Mapping[str, Any]) -> Tensors:
    """The same of the decoder, whose language model's head has a name of its own."""
    found, dropped = ending(values.get("architectures")), {}
    names = {"dense": "dense", "norm": "norm"}
    outside = (*under("lm_head.", "head.transforms.0.", names), *masked_rules(values, "decoder"))
    if found == SEQUENCE:
        outside = (*under("head.", "task.transforms.0.", names), CLASSIFIER)
    elif found == BARE and values.get("architectures"):
        outside, dropped = (), {r"(lm_head|decoder)\..+": "comes after the hidden states"}
    return Tensors((*RULES, *_APART), outside=outside, dropped=dropped)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converters write the norms' eps as that of RMSNorms, where config.json calls it so."""
    return {
        "norm_eps": values.get("norm_eps", values.get(".norm_eps", DEFAULTS["norm_eps"])),
        "norm_bias": "output_norm.bias" in values[".tensors"],
    }


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    bases = {layer.window is None: layer.rope.theta for layer in layers}
    # The first layer has no window, the next that has none ends a period.
    full = [i for i, layer in enumerate(layers) if layer.window is None]
    return {
        "rope.freq_base": bases[True],
        "rope.freq_base_swa": bases.get(False, _THETA[SLIDING]),
        "attention.sliding_window_pattern": full[1] if len(full) > 1 else len(layers),
    }


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

_HARMLESS = frozenset(
    (
        "initializer_cutoff_factor",
        "deterministic_flash_attn",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "reference_compile",
        "repad_logits_with_grad",
        # Without effect in the first version's files: norm_eps counted and positions were rotary.
        "layer_norm_eps",
        "position_embedding_type",
    )
)

FAMILIES = (
    Family(
        "modernbert",
        "ModernBert",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        harmless=_HARMLESS,
        gguf=Gguf(
            "modern-bert",
            settings={
                "attention.head_count_kv": None,
                "attention.layer_norm_epsilon": "norm_eps",
                "attention.layer_norm_rms_epsilon": ".norm_eps",
                "attention.sliding_window": "local_attention",
                "attention.sliding_window_pattern": "global_attn_every_n_layers",
                "hidden_act": "hidden_activation",
                "rope.freq_base": "global_rope_theta",
                "rope.freq_base_swa": "local_rope_theta",
            },
            causal=False,
            values=_from_gguf,
            settings_of=_settings_of,
        ),
    ),
    Family(
        "modernbert-decoder",
        "ModernBertDecoder",
        partial(read, causal=True),
        causal_table,
        defaults={key: DEFAULTS[key] for key in DEFAULTS if key != "classifier_pooling"},
        write=write,
        # transformers computes sliding_window from local_attention, and writes it.
        harmless=_HARMLESS | {"classifier_pooling", "sliding_window"},
    ),
)
