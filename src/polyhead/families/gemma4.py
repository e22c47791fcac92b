"""Gemma 4 (text, 2026): its keys of config.json.

Gemma 3's mix of windows and full attention and its norms on both sides, with

- heads of full attention that are wider, rotate their first pairs alone, and may have one
  projection for keys and values;
- values normalized as keys are, and scores that are not scaled;
- last layers that read the keys and values of the last layer of their kind before them;
- a vector of every token for each layer, beside the residual stream (not in the unified models);
- a learned factor of what each layer gives;
- in the large model, experts beside the dense network, which read the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    CrossLayerAttentionConfig,
    DenseAndExpertsConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.config.feed_forward import Activation
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
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
from polyhead.families.common.rope import read_ropes, write_ropes
from polyhead.families.common.steps import PerExpert, Rows
from polyhead.families.common.tables import SANDWICH
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation
from polyhead.families.gemma4_gguf import GGUF

_THETAS: dict[str, float | None] = {FULL: 1e6, SLIDING: 1e4}
_ROPES = {
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": _THETAS[FULL],
    },
    SLIDING: {"rope_type": "default", "rope_theta": _THETAS[SLIDING]},
}
_OVERRIDDEN = ("head_dim", "num_key_value_heads")


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    count = sizes.num_layers
    default = [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    kinds = [*read_layer_types(keys, count, default)[:-1], FULL]  # the last one always
    keys.expect("use_bidirectional_attention", None, "vision")  # of images
    one_projection, biased = keys.flag("attention_k_eq_v"), keys.flag("attention_bias")
    own = _read_overrides(keys, kinds, one_projection=one_projection)
    head_dims = {
        kind: int(own.get(i, {}).get("head_dim", sizes.head_dim)) for i, kind in enumerate(kinds)
    }
    stated = Keys({"rope_parameters": keys.take("rope_parameters", None) or _ROPES}, keys.where)
    ropes = {
        kind: read_ropes(stated, dim, sizes.max_positions, _THETAS)[kind]
        for kind, dim in head_dims.items()
    }
    plain = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        scale=1.0,
        dropout=keys.number("attention_dropout"),
    )
    window, dim = keys.whole("sliding_window"), keys.whole("hidden_size_per_layer_input", 0)
    attentions: list[AttentionConfig] = []
    for i, kind in enumerate(kinds):
        changed = own.get(i, {})
        attentions.append(
            replace(
                plain,
                head_dim=changed.get("head_dim", sizes.head_dim),
                num_kv_heads=changed.get("num_key_value_heads", sizes.num_kv_heads),
                rope=ropes[kind],
                window=window if kind == SLIDING else None,
                v_norm=replace(norm, weight=False),
                values_from_keys=one_projection and kind == FULL,
            )
        )
    first = share_keys(keys, attentions, kinds)
    activation, hidden = read_activation(keys, "hidden_activation"), keys.size("intermediate_size")
    wide = 2 if keys.flag("use_double_wide_mlp") else 1
    input_config = PerLayerInputConfig(dim, activation, norm) if dim else None
    experts = _read_experts(keys, activation) if keys.flag("enable_moe_block", False) else None
    networks: list[FeedForwardConfig | DenseAndExpertsConfig] = []
    for i in range(count):
        dense = FeedForwardConfig(hidden if i < first else wide * hidden, activation=activation)
        networks.append(dense if experts is None else DenseAndExpertsConfig(dense, experts, norm))
    layers = [
        LayerConfig(
            attention,
            network,
            norm,
            norm_placement="sandwich",
            per_layer_input=input_config,
            output_scale=True,
        )
        for attention, network in zip(attentions, networks, strict=True)
    ]
    vocab_size = keys.whole("vocab_size_per_layer_input", 0)
    return read_decoder(
        keys,
        layers,
        max_positions=sizes.max_positions,
        norm=norm,
        embedding=EmbeddingConfig(scale=math.sqrt(sizes.embed_dim)),
        logit_softcap=keys.number("final_logit_softcapping", None),
        per_layer_embedding=PerLayerEmbeddingConfig(vocab_size, dim, norm) if dim else None,
    )


def _read_experts(keys: Keys, activation: Activation) -> MixtureConfig:
    return MixtureConfig(
        FeedForwardConfig(keys.size("moe_intermediate_size"), activation=activation),
        keys.size("num_experts"),
        keys.size("top_k_experts"),
        normalize=True,
    )


def _read_overrides(
    keys: Keys, kinds: list[str], *, one_projection: bool
) -> dict[int, dict[str, int]]:
    """Sizes of the heads of single layers, as transformers writes them or as the first files do."""
    wide: dict[str, int] = {"head_dim": keys.size("global_head_dim", 512)}
    heads = keys.size("num_global_key_value_heads", None)
    if one_projection and heads is not None:
        wide["num_key_value_heads"] = heads
    stated = keys.take("per_layer_config", None)
    if stated is None:
        return {i: wide for i, kind in enumerate(kinds) if kind == FULL}
    names = {str(i): i for i in range(len(kinds))}
    if not isinstance(stated, Mapping) or not {str(name) for name in stated} <= names.keys():
        raise keys.refused("per_layer_config", stated, "an object of layers' numbers")
    found: dict[int, dict[str, int]] = {}
    for name, changed in stated.items():
        inner = Keys(changed, f"{keys.where}: per_layer_config.{name}")
        found[names[str(name)]] = {key: inner.size(key) for key in _OVERRIDDEN if inner.has(key)}
        inner.finish()
    return found


def share_keys(keys: Keys, attentions: list[AttentionConfig], kinds: list[str]) -> int:
    """Makes the last layers read the keys of the last layer of their kind before them.

    Args:
        keys: Keys of config.json.
        attentions: Of all layers; those of the last, and of what they read, are replaced.
        kinds: Of the same layers, full or with a window.

    Returns:
        The first layer that reads another's keys.

    Raises:
        ConfigError: No layer is left to read from.
    """
    count = len(kinds)
    first = count - keys.whole("num_kv_shared_layers")
    if not 0 < first <= count:
        raise keys.refused("num_kv_shared_layers", count - first, f"0 to {count - 1} layers")
    for i in range(first, len(kinds)):
        sources = [j for j in range(first) if kinds[j] == kinds[i]]
        if not sources:
            raise keys.refused(
                "num_kv_shared_layers", len(kinds) - first, f"a layer of {kinds[i]} before them"
            )
        source = attentions[sources[-1]]
        attentions[sources[-1]] = replace(source, hands_on_keys=True)
        own = {
            name: getattr(source, name)
            for name in ("qkv_bias", "out_bias", "qk_norm", "window", "rope", "scale", "dropout")
        }
        attentions[i] = CrossLayerAttentionConfig(
            source.num_heads, source.num_kv_heads, source.head_dim, keys_of=sources[-1], **own
        )
    return first


def per_layer_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Keys of the vectors of single layers."""
    vectors = config.per_layer_embedding
    return {
        "hidden_size_per_layer_input": 0 if vectors is None else vectors.dim,
        "vocab_size_per_layer_input": (
            config.vocab_size if vectors is None else vectors.vocab_size
        ),
    }


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    whole: list[Any] = [config.layers[i].feed_forward for i in (0, -1)]
    network, last = (getattr(each, "dense", each) for each in whole)
    experts = getattr(whole[0], "mixture", None)
    narrow = next((each for each in found if each.window is not None), found[0])
    base = {"head_dim": narrow.head_dim, "num_key_value_heads": narrow.num_kv_heads}
    sizes = [{"head_dim": a.head_dim, "num_key_value_heads": a.num_kv_heads} for a in found]
    heads = {FULL if a.window is None else SLIDING: a for a in found}
    return {
        **base,
        "hidden_activation": write_activation(network.activation),
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": narrow.window or DEFAULTS["sliding_window"],
        "attention_k_eq_v": any(each.values_from_keys for each in found),
        "num_kv_shared_layers": sum(each.kind == "cross_layer" for each in found),
        "enable_moe_block": experts is not None,
        **(_write_experts(experts) if experts is not None else {}),
        "use_double_wide_mlp": last.hidden_dim != network.hidden_dim,
        **per_layer_sizes(config),
        "per_layer_config": {
            str(i): {key: size for key, size in own.items() if size != base[key]}
            for i, own in enumerate(sizes)
            if own != base
        },
        "rope_parameters": {**_ROPES, **_write_ropes(heads)},
    }


def _write_experts(experts: MixtureConfig) -> dict[str, Any]:
    return {
        "num_experts": experts.num_experts,
        "top_k_experts": experts.experts_per_token,
        "moe_intermediate_size": experts.expert.hidden_dim,
    }


def write_unified(config: TransformerConfig) -> dict[str, Any]:
    values = write(config)
    if config.per_layer_embedding is not None:
        raise ConfigError("this family has no vectors of single layers")
    others = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    return {key: value for key, value in values.items() if key not in others}


def _write_ropes(heads: Mapping[str, AttentionConfig]) -> dict[str, Any]:
    """The rotary embedding of each kind of layer."""
    sizes = {kind: each.head_dim for kind, each in heads.items()}
    written: dict[str, Any] = write_ropes({kind: a.rope for kind, a in heads.items()}, sizes)
    return dict(written["rope_parameters"])


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; files may hold projections of keys that no layer reads."""
    table = SANDWICH.extended(Rule("layers.{i}.layer_scalar", "layers.{i}.output_scale"), *VECTORS)
    if values.get("enable_moe_block"):
        table = table.extended(*_WITH_EXPERTS)
    return without_unread_keys(table, values)


def without_unread_keys(table: Tensors, values: Mapping[str, Any]) -> Tensors:
    """The table of a file that may hold projections of keys that no layer reads.

    Args:
        table: Of all other tensors.
        values: config.json's object.
    """
    shared = values.get("num_kv_shared_layers") or 0
    count = values["num_hidden_layers"]
    sharing = "|".join(str(i) for i in range(count - shared, count))
    reason = "the layer reads the keys and values of another"
    of_gguf = r"attn_[kv](_norm)?"
    unread = rf"layers\.({sharing})\.(self_attn\.[kv]_(proj|norm)|{of_gguf})\..+"
    return replace(table, dropped={**table.dropped, unread: reason}) if sharing else table


VECTORS = (
    *under(
        "layers.{i}.",
        "layers.{i}.per_layer_input.",
        {
            "per_layer_input_gate": "gate_proj",
            "per_layer_projection": "o_proj",
            "post_per_layer_input_norm": "norm",
        },
    ),
    Rule("embed_tokens_per_layer", "per_layer_embedding.tokens"),
    Rule("per_layer_model_projection", "per_layer_embedding.projection"),
    Rule("per_layer_projection_norm", "per_layer_embedding.norm"),
)
"""Names of the vectors of single layers."""

_LAYER, _NETWORK = "layers.{i}.", "layers.{i}.feed_forward."
_WITH_EXPERTS = (
    *under(
        _LAYER,
        _NETWORK,
        {
            "pre_feedforward_layernorm": "dense_norm",
            "post_feedforward_layernorm_1": "dense_out_norm",
            "pre_feedforward_layernorm_2": "mixture_norm",
            "post_feedforward_layernorm_2": "mixture_out_norm",
            "router.proj": "mixture.router",
            "router.scale": "router_scale",
            "router.per_expert_scale": "expert_scale",
            **{f"mlp.{name}": f"dense.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        },
    ),
    Rule(
        _LAYER + "experts.gate_up_proj",
        [f"{_NETWORK}mixture.experts.{{j}}.{name}_proj.weight" for name in ("gate", "up")],
        PerExpert(),
        Rows(),
    ),
    Rule(
        _LAYER + "experts.down_proj",
        _NETWORK + "mixture.experts.{j}.down_proj.weight",
        PerExpert(),
    ),
)


DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}

FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma4",
        read,
        tensors,
        defaults=DEFAULTS
        | {
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        write=write,
        harmless=frozenset(("num_experts", "top_k_experts", "moe_intermediate_size")),
        bare="TextModel",
        gguf=GGUF,
    ),
    Family(
        "gemma4_unified_text",
        "Gemma4Unified",
        read,
        tensors,
        defaults=DEFAULTS
        | {
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        write=write_unified,
        not_supported={"enable_moe_block": "transformers does not compute it either"},
        bare="TextModel",
    ),
)
