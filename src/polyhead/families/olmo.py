"""OLMo 1 to 3 and OLMoE (Groeneveld et al. 2024 and after).

1 has norms without weights and may clip queries, keys and values; 2 normalizes what attention and
network give instead of what they read, and queries and keys over all heads at once; 3 adds windows;
OLMoE has Llama's norms and mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, WINDOWS, Gguf, layer_types
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    Sizes,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope, write_rope
from polyhead.families.common.tables import AFTER, DECODER
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
        return {
            kind: read_rope(
                Keys({"rope_parameters": values.get(kind)}, f"{keys.where}: {kind}"),
                sizes.head_dim,
                sizes.max_positions,
                theta=5e5,
            )
            for kind in (FULL, SLIDING)
        }
    full = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=5e5)
    return {FULL: full, SLIDING: RopeConfig(full.theta)}


def write_third(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    window = next((each.window for each in attentions if each.window is not None), 4096)
    full = next((each.rope for each in attentions if each.window is None), attentions[0].rope)
    return {"sliding_window": window, **write_rope(full, 0)}


def read_mixture(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    attention = _attention(
        keys,
        sizes,
        rope=rope,
        qk_norm=QKNormConfig(norm, place="full_width"),
        qkv_clip=keys.number("clip_qkv", None),
    )
    mixture = MixtureConfig(
        read_network(keys),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        normalize=keys.flag("norm_topk_prob"),
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, mixture, norm)] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


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
        read_mixture,
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
)
