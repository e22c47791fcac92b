"""OLMo 1 to 3, OLMoE, FlexOlmo and OLMo Hybrid (Groeneveld et al. 2024 and after).

1 has norms without weights and may clip queries, keys and values; 2 normalizes what attention and
network give instead of what they read, and queries and keys over all heads at once; 3 adds windows;
OLMoE has Llama's norms and mixtures of experts, FlexOlmo the norms of 2 and OLMoE's mixtures;
Hybrid has three layers of gated DeltaNet, with norms before them, for each layer like those of 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, WINDOWS, Gguf, layer_types
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    LINEAR,
    SLIDING,
    Sizes,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope, read_ropes, write_rope
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import (
    AFTER,
    AROUND_LAYERS,
    ATTENTION,
    DECODER,
    FREQUENCIES,
    NETWORK,
    joined_convolution,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.qwen_moe import EXPERTS

_DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
_CLIP: Mapping[str, str | None] = {"attention.clamp_kqv": "clip_qkv"}


def _attention(keys: Keys, sizes: Sizes, **options: Any) -> AttentionConfig:
    biased = keys.flag("attention_bias")
    dropout = keys.number("attention_dropout")
    return sizes.attention(qkv_bias=biased, out_bias=biased, dropout=dropout, **options)


def read_first(keys: Keys) -> TransformerConfig:
    sizes = read_sizes(keys)
    norm = NormConfig("layernorm", eps=1e-5, weight=False)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    attention = _attention(keys, sizes, rope=rope, qkv_clip=keys.number("clip_qkv", None))
    layer = LayerConfig(attention, read_network(keys), norm)
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def read_second(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    qk_norm = QKNormConfig(norm, place="full_width")
    layer = LayerConfig(
        _attention(keys, sizes, rope=rope, qk_norm=qk_norm),
        read_network(keys),
        norm,
        norm_placement="after",
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def read_third(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    ropes = _ropes_of_third(keys, sizes)
    attention = _attention(keys, sizes, qk_norm=QKNormConfig(norm, place="full_width"))
    default = [SLIDING if (i + 1) % 4 else FULL for i in range(sizes.num_layers)]
    kinds = read_layer_types(keys, sizes.num_layers, default)
    window, network = keys.whole("sliding_window"), read_network(keys)
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=window),
    }
    return read_decoder(
        keys,
        [LayerConfig(of_kind[kind], network, norm, norm_placement="after") for kind in kinds],
        max_positions=reach(ropes[FULL], sizes.max_positions),
        norm=norm,
    )


def _ropes_of_third(keys: Keys, sizes: Sizes) -> dict[str, RopeConfig]:
    """One for each kind of layer; in the older spelling the scaling is the full layers' alone."""
    values = keys.take("rope_parameters", None)
    if isinstance(values, Mapping) and values.keys() <= {FULL, SLIDING}:
        return read_ropes(keys, sizes.head_dim, sizes.max_positions, {FULL: 5e5, SLIDING: 5e5})
    full = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=5e5)
    return {FULL: full, SLIDING: RopeConfig(full.theta)}


def write_third(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    window = next((each.window for each in attentions if each.window is not None), 4096)
    full = next((each.rope for each in attentions if each.window is None), attentions[0].rope)
    return {"sliding_window": window, **write_rope(full, 0)}


def read_mixture(keys: Keys, *, flex: bool) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=5e5 if flex else 1e4)
    attention = _attention(
        keys,
        sizes,
        rope=rope,
        qk_norm=QKNormConfig(norm, place="full_width"),
        qkv_clip=None if flex else keys.number("clip_qkv", None),
    )
    mixture = MixtureConfig(
        read_network(keys),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        normalize=keys.flag("norm_topk_prob"),
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, mixture, norm, "after" if flex else "pre")] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def read_hybrid(keys: Keys) -> TransformerConfig:
    sizes, norm, network = (
        read_sizes(keys, own_head_dim=False),
        read_rms_norm(keys),
        read_network(keys),
    )
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    settings = keys.take("rope_parameters", None)
    rotates = keys.has("rope_theta") or (
        isinstance(settings, Mapping) and settings.get("rope_theta") is not None
    )
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions) if rotates else None
    qk_norm = QKNormConfig(norm, place="full_width")
    attention = _attention(keys, sizes, rope=rope, qk_norm=qk_norm)
    key_heads = keys.size("linear_num_key_heads", sizes.num_heads)
    key_dim = keys.size("linear_key_head_dim", int(0.75 * sizes.embed_dim / key_heads))
    state = GatedDeltaNetConfig(
        keys.size("linear_num_value_heads", sizes.num_heads),
        key_heads,
        key_dim,
        keys.size("linear_value_head_dim", 2 * key_dim),
        keys.whole("linear_conv_kernel_dim"),
        norm_eps=1e-5,
        allow_neg_eigval=keys.flag("linear_allow_neg_eigval"),
    )
    kinds = read_layer_types(
        keys, sizes.num_layers, _kinds_of_hybrid(sizes.num_layers), (LINEAR, FULL)
    )
    layers = [
        LayerConfig(attention, network, norm, norm_placement="after")
        if kind == FULL
        else LayerConfig(state, network, norm)
        for kind in kinds
    ]
    reached = sizes.max_positions if rope is None else reach(rope, sizes.max_positions)
    return read_decoder(keys, layers, max_positions=reached, norm=norm)


def _kinds_of_hybrid(count: int) -> list[str]:
    kinds = [FULL if i % 4 == 3 else LINEAR for i in range(count)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def write_hybrid(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    full = next((each for each in found if each.kind == "heads"), None)
    state = next((each for each in found if each.kind == "gated_delta"), None)
    if full is None or state is None:
        raise ConfigError("this family needs layers of attention and of gated DeltaNet")
    return {
        "layer_types": [FULL if each == full else LINEAR for each in found],
        "linear_num_value_heads": state.num_heads,
        "linear_num_key_heads": state.num_key_heads,
        "linear_key_head_dim": state.head_k_dim,
        "linear_value_head_dim": state.head_v_dim,
        "linear_conv_kernel_dim": state.conv_kernel,
        "linear_allow_neg_eigval": state.allow_neg_eigval,
    }


_BEFORE = {
    "attention_layer_norm": "attention_norm",
    "input_layernorm": "attention_norm",
    "feedforward_layer_norm": "feed_forward_norm",
    "post_attention_layernorm": "feed_forward_norm",
}
_BEHIND = {
    "post_attention_layernorm": "attention_out_norm",
    # transformers gives it the name of the other layers' norm when it saves.
    "feedforward_layer_norm": "attention_out_norm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}
_STATE = {
    **{name: name for name in ("A_log", "dt_bias", "q_proj", "k_proj", "v_proj", "o_proj")},
    "a_proj": "decay_proj",
    "b_proj": "beta_proj",
    "g_proj": "gate_proj",
    "o_norm": "norm",
}


def tensors_of_hybrid(values: Mapping[str, Any]) -> Tensors:
    """The table of names; a layer's own depend on what it is."""
    rules: list[Rule] = []
    kinds = values.get("layer_types") or _kinds_of_hybrid(values["num_hidden_layers"])
    for i, kind in enumerate(kinds):
        layer = f"layers.{i}."
        rules += under(layer, layer, _BEHIND if kind == FULL else _BEFORE)
        if kind != FULL:
            theirs, ours = layer + "linear_attn.", layer + "attention."
            rules += under(theirs, ours, _STATE)
            rules.append(joined_convolution(theirs, ours))
            rules.append(Rule(theirs + "conv1d.weight", ours + "conv_weight", Shaped((1,))))
    return Tensors((*AROUND_LAYERS, *rules, *ATTENTION, *NETWORK), dropped=FREQUENCIES)


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"clip_qkv": attention.qkv_clip}


def _has_windows(metadata: Mapping[str, Any]) -> bool:
    """Two families share one GGUF architecture."""
    return "olmo2.attention.sliding_window" in metadata


FAMILIES = (
    Family(
        "olmo",
        "Olmo",
        read_first,
        DECODER,
        defaults=_DEFAULTS | {"clip_qkv": None},
        write=write,
        gguf=Gguf("olmo", settings={**_CLIP, "attention.layer_norm_epsilon": None}, steps=PAIRS),
    ),
    Family(
        "olmo2",
        "Olmo2",
        read_second,
        AFTER,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5},
        gguf=Gguf("olmo2", fits=lambda metadata: not _has_windows(metadata)),
    ),
    Family(
        "olmo3",
        "Olmo3",
        read_third,
        AFTER,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        write=write_third,
        gguf=Gguf("olmo2", WINDOWS, values=layer_types, fits=_has_windows),
    ),
    Family(
        "olmoe",
        "Olmoe",
        partial(read_mixture, flex=False),
        DECODER.extended(*EXPERTS),
        defaults=_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
        gguf=Gguf("olmoe", settings=_CLIP),
    ),
    Family(
        "flex_olmo",
        "FlexOlmo",
        partial(read_mixture, flex=True),
        AFTER.extended(*EXPERTS),
        defaults=_DEFAULTS
        | {
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 100_257,
            "pad_token_id": 100_277,
        },
        harmless=frozenset(("router_aux_loss_coef",)),
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybrid",
        read_hybrid,
        tensors_of_hybrid,
        defaults=_DEFAULTS
        | {
            "vocab_size": 100_352,
            "num_attention_heads": 30,
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-6,
            "layer_types": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "eos_token_id": 100_257,
            "pad_token_id": 100_277,
        },
        write=write_hybrid,
        harmless=frozenset(
            f"linear_{name}"
            for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
        ),
    ),
)
