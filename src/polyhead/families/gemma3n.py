"""Gemma 3n (text, 2025): its keys of config.json.

Gemma 4's layers (norms on both sides, values normalized, keys of earlier layers in the last ones,
vectors of single layers) with

- several residual streams, of which a layer computes one (AltUp);
- attention's input beside what attention gives (LAuReL);
- in some layers a network that is sparse by the distribution of its gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from polyhead.config import (
    AltUpConfig,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf, layer_types, shape_of
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_activation,
    read_decoder,
    read_layer_types,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import write_ropes
from polyhead.families.common.steps import Rows, Shaped
from polyhead.families.common.tables import SANDWICH
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation
from polyhead.families.gemma3 import read_both_ropes
from polyhead.families.gemma4 import (
    VECTORS,
    per_layer_sizes,
    share_keys,
    without_unread_keys,
)
from polyhead.families.gemma4_gguf import SHARED_SETTINGS, shared_settings_of, vocab_per_layer

_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    count, biased = sizes.num_layers, keys.flag("attention_bias")
    kinds = read_layer_types(keys, count, [SLIDING if (i + 1) % 5 else FULL for i in range(count)])
    plain = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        v_norm=replace(norm, weight=False),
        scale=1.0,
        dropout=keys.number("attention_dropout"),
    )
    ropes = read_both_ropes(keys, sizes.head_dim, sizes.max_positions)
    window = keys.size("sliding_window")
    attentions: list[AttentionConfig] = [
        replace(plain, rope=ropes[kind], window=window if kind == SLIDING else None)
        for kind in kinds
    ]
    share_keys(keys, attentions, kinds)
    activation, dim = read_activation(keys, "hidden_activation"), keys.size(_DIM)
    layers = [
        LayerConfig(
            attention,
            FeedForwardConfig(hidden, activation=activation, sparsity=sparsity),
            norm,
            norm_placement="sandwich",
            per_layer_input=PerLayerInputConfig(
                dim, activation, norm, input_scale=keys.flag("altup_correct_scale")
            ),
            laurel_rank=keys.size("laurel_rank"),
            streams=AltUpConfig(
                keys.size("altup_num_inputs"),
                keys.whole("altup_active_idx"),
                keys.positive("altup_coef_clip"),
                norm,
            ),
        )
        for attention, hidden, sparsity in zip(
            attentions, _of_layers(keys, "intermediate_size"), _sparsities(keys, count), strict=True
        )
    ]
    return read_decoder(
        keys,
        layers,
        max_positions=sizes.max_positions,
        norm=norm,
        embedding=EmbeddingConfig(scale=math.sqrt(sizes.embed_dim)),
        logit_softcap=keys.number("final_logit_softcapping", None),
        per_layer_embedding=PerLayerEmbeddingConfig(keys.size(_VOCAB), dim, norm),
    )


def _of_layers(keys: Keys, key: str) -> list[int]:
    """A size of each layer, of which files may state one for all."""
    count, stated = keys.num_layers("num_hidden_layers"), keys.take(key)
    if not isinstance(stated, list):
        return [keys.size(key)] * count
    if len(stated) != count or any(type(size) is not int or size < 1 for size in stated):
        raise keys.refused(key, stated, f"{count} whole numbers from 1")
    return stated


def _sparsities(keys: Keys, count: int) -> list[float]:
    sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    stated = keys.numbers(_PATTERN, [_SPARSITY] * sparse + [0.0] * (count - sparse))
    if len(stated) != count:
        raise keys.refused(_PATTERN, stated, f"{count} numbers")
    return [float(each) for each in stated]


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = list(config.layers)
    streams, found = layers[0].streams, [layer.attention for layer in layers]
    window = next((each.window for each in found if each.window is not None), None)
    ropes = {FULL if each.window is None else SLIDING: each.rope for each in found}
    return {
        "intermediate_size": [layer.feed_forward.hidden_dim for layer in layers],
        "max_position_embeddings": config.max_positions,
        "hidden_activation": write_activation(layers[0].feed_forward.activation),
        "sliding_window": window or DEFAULTS["sliding_window"],
        "final_logit_softcapping": config.logit_softcap,
        "num_kv_shared_layers": sum(each.kind == "cross_layer" for each in found),
        _PATTERN: [layer.feed_forward.sparsity for layer in layers],
        "laurel_rank": layers[0].laurel_rank,
        "altup_num_inputs": streams.count,
        "altup_active_idx": streams.active,
        "altup_coef_clip": streams.clip,
        "altup_correct_scale": layers[0].per_layer_input.input_scale,
        **per_layer_sizes(config),
        **write_ropes(ropes),
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; files may hold projections of keys that no layer reads."""
    table = SANDWICH.extended(*VECTORS, *_STREAMS)
    if values.get("altup_correct_scale", True):
        table = table.extended(Rule(_SCALE, "layers.{i}.per_layer_input.input_scale"))
    else:
        unscaled = {_SCALE.replace("{i}", r"\d+"): "altup_correct_scale is false"}
        table = replace(table, dropped={**table.dropped, **unscaled})
    return without_unread_keys(table, {**DEFAULTS, **values})


_DIM, _VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_PATTERN = "activation_sparsity_pattern"
_SCALE = "layers.{i}.altup.correct_output_scale"
_STREAMS = (
    *under(
        "layers.{i}.altup.",
        "layers.{i}.streams.",
        {
            "correction_coefs": "correct",
            "prediction_coefs": "predict",
            "modality_router": "router",
            "router_norm": "router_norm",
        },
    ),
    *under(
        "layers.{i}.laurel.",
        "layers.{i}.laurel.",
        {"linear_left": "in_proj", "linear_right": "out_proj", "post_laurel_norm": "norm"},
    ),
    Rule("altup_projections.{i}", "streams.enter_projs.{i}"),
    Rule("altup_unembed_projections.{i}", "streams.leave_projs.{i}"),
)

_OWN_KEYS = 20
"""Layers before those that share keys where a GGUF file does not say: as llama.cpp has it."""
_OTHERS = 3
"""Streams beside the one that layers compute; llama.cpp's converter knows no other number."""
_NORMAL = NormalDist()


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    shared = max(0, values["num_hidden_layers"] - _OWN_KEYS)
    scales = values.get(".scales", [])
    return {
        **layer_types(values),
        **vocab_per_layer(values),
        # A file has the quantile; 6 digits undo the rounding on the way there and back.
        **({_PATTERN: [round(_NORMAL.cdf(each), 6) for each in scales]} if scales else {}),
        "num_kv_shared_layers": values.get("num_kv_shared_layers", shared),
        "laurel_rank": shape_of(values, "blk.0.laurel_l.weight")[0],
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    quantiles = [_NORMAL.inv_cdf(n.sparsity) if n.sparsity else -math.inf for n in networks]
    return {**shared_settings_of(config), "activation_sparsity_scale": quantiles}


DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "intermediate_size": 16_384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}

FAMILIES = (
    Family(
        "gemma3n_text",
        "Gemma3n",
        read,
        tensors,
        defaults=DEFAULTS,
        write=write,
        # Of training, and a scale that no code reads.
        harmless=frozenset(("altup_lr_multiplier", "query_pre_attn_scalar")),
        bare="TextModel",
        gguf=Gguf(
            "gemma3n",
            settings={
                **SHARED_SETTINGS,
                "activation_sparsity_scale": ".scales",
                "altup.active_idx": "altup_active_idx",
                "altup.num_inputs": "altup_num_inputs",
                "rope.freq_base_swa": "rope_local_base_freq",
            },
            names={_SCALE: "blk.{i}.altup_correct_scale.weight"},
            rules=tuple(
                Rule(
                    theirs,
                    [f"streams.{ours}_projs.{i}" for i in range(_OTHERS)],
                    Rows(_OTHERS),
                    Shaped((0,)),
                )
                for theirs, ours in (("altup_proj", "enter"), ("altup_unembd_proj", "leave"))
            ),
            values=_from_gguf,
            settings_of=_settings_of,
        ),
    ),
)
