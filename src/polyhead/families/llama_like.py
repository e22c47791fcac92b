"""Decoders that differ from Llama by little: Arcee, Seed-OSS, Helium, Nemotron, ERNIE 4.5, Apertus,
Hunyuan, Ministral, SmolLM3 and EXAONE 4 (2024, 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import NormConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import (
    PLAIN_DEFAULTS,
    Plain,
    every,
    windowed,
    write_share,
    write_window,
)
from polyhead.families.common.reading import FULL, SLIDING, read_layer_types, read_network
from polyhead.families.common.steps import RotaryPairs
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, DECODER, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under

_DEFAULTS = PLAIN_DEFAULTS | {"num_key_value_heads": None}
_TURNED = DECODER.extended(
    *(
        Rule(f"layers.{{i}}.self_attn.{name}", f"layers.{{i}}.attention.{name}", RotaryPairs())
        for name in ("q_proj", "k_proj")
    )
)
_AFTER = Tensors(
    (
        *AROUND_LAYERS,
        *under(
            "layers.{i}.",
            "layers.{i}.",
            {
                "post_attention_layernorm": "attention_out_norm",
                "post_feedforward_layernorm": "feed_forward_out_norm",
            },
        ),
        *ATTENTION,
        *NETWORK,
    )
)


def read_arcee(keys: Keys) -> TransformerConfig:
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=network)
    return plain.decoder([plain.layer(plain.attention())])


def read_seed_oss(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")))
    attention = plain.attention(out_bias=keys.flag("attention_out_bias"))
    dropout = keys.number("residual_dropout")
    return plain.decoder([plain.layer(attention, dropout=dropout)])


def write_seed_oss(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        "attention_out_bias": attention.out_bias,
        "residual_dropout": config.layers[0].dropout,
    }


def read_helium(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")), theta=1e5)
    return plain.decoder([plain.layer(plain.attention(out_bias=False))])


def read_nemotron(keys: Keys) -> TransformerConfig:
    norm = NormConfig("layernorm", eps=keys.number("norm_eps"), bias=True, weight_offset=1.0)
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, norm=norm, network=network, share=0.5)
    return plain.decoder([plain.layer(plain.attention())])


def write_nemotron(config: TransformerConfig) -> dict[str, Any]:
    return {"norm_eps": config.layers[0].norm.eps, **write_share(config)}


def read_ernie(keys: Keys) -> TransformerConfig:
    biased = keys.flag("use_bias")
    plain = Plain(keys, network=read_network(keys, bias=biased), theta=5e5)
    attention = replace(plain.attention(), qkv_bias=biased, out_bias=biased)
    return plain.decoder([plain.layer(attention)])


def write_ernie(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"use_bias": attention.qkv_bias}


def read_hunyuan(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm, place="after_rope"))
    return plain.decoder([plain.layer(attention)])


def read_ministral(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    count = plain.sizes.num_layers
    every_layer = [SLIDING if keys.whole("sliding_window", None) else FULL] * count
    attentions = windowed(keys, plain.attention(), count, every_layer)
    return plain.decoder([plain.layer(each) for each in attentions])


def read_smollm3(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")), theta=2e6)
    count, interval = plain.sizes.num_layers, keys.whole("no_rope_layer_interval")
    if interval < 1:
        raise keys.refused("no_rope_layer_interval", interval, "at least 1 layer")
    rotated = keys.take("no_rope_layers", None)
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count or {*map(str, rotated)} - {"0", "1"}:
        raise keys.refused("no_rope_layers", rotated, f"{count} of 0 and 1")
    used, window = keys.flag("use_sliding_window"), keys.whole("sliding_window", None)
    hidden = [SLIDING if used and window is not None and not each else FULL for each in rotated]
    kinds = read_layer_types(keys, count, hidden)
    if SLIDING in kinds and not (used and window is not None):
        raise keys.refused("layer_types", kinds, "sliding_attention only with a used window")
    attention = plain.attention()
    return plain.decoder(
        [
            plain.layer(
                replace(
                    attention,
                    rope=plain.rope if turned else None,
                    window=window if kind == SLIDING else None,
                )
            )
            for turned, kind in zip(rotated, kinds, strict=True)
        ]
    )


def write_smollm3(config: TransformerConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer.attention.rope is not None) for layer in config.layers]}


def read_exaone4(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    count, window = plain.sizes.num_layers, keys.whole("sliding_window", None)
    pattern = keys.take("sliding_window_pattern", None)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    if window is None:
        keys.take("layer_types", None)  # without a window they all see and rotate everything
        attentions = [attention] * count
    else:
        length = pattern if isinstance(pattern, int) and pattern > 0 else 4
        default = every(count, length)
        attentions = windowed(keys, attention, count, default, rope=None)
    return plain.decoder([plain.layer(each, norm_placement="after") for each in attentions])


def read_apertus(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, gated=False), theta=12e6)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    return plain.decoder([plain.layer(attention)])


FAMILIES = (
    Family(
        "arcee",
        "Arcee",
        read_arcee,
        DECODER,
        defaults=_DEFAULTS
        | {
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gguf=Gguf("arcee", steps=PAIRS),
    ),
    Family(
        "seed_oss",
        "SeedOss",
        read_seed_oss,
        DECODER,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "mlp_bias": False,
            "bos_token_id": 0,
            "pad_token_id": 1,
        },
        write=write_seed_oss,
        gguf=Gguf("seed_oss"),
    ),
    Family(
        "helium",
        "Helium",
        read_helium,
        _TURNED,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "mlp_bias": False,
            "pad_token_id": 3,
        },
    ),
    Family(
        "nemotron",
        "Nemotron",
        read_nemotron,
        DECODER,
        defaults={key: value for key, value in _DEFAULTS.items() if key != "rms_norm_eps"}
        | {
            "head_dim": None,
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "mlp_bias": False,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        write=write_nemotron,
        gguf=Gguf("nemotron", {"attention.layer_norm_epsilon": "norm_eps"}, norms=1.0),
    ),
    Family(
        "ernie4_5",
        "Ernie4_5",
        read_ernie,
        _TURNED,
        defaults={
            key: value
            for key, value in _DEFAULTS.items()
            if key not in ("attention_bias", "attention_dropout")
        }
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": False,
            "pad_token_id": 0,
        },
        write=write_ernie,
        gguf=Gguf("ernie4_5"),
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        read_hunyuan,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *under(
                    "layers.{i}.self_attn.",
                    "layers.{i}.attention.",
                    {"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
                ),
                *ATTENTION,
                *NETWORK,
            )
        ),
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "pad_token_id": 0, "head_dim": None},
        harmless=frozenset(("eod_token_id",)),
        gguf=Gguf("hunyuan-dense"),
    ),
    Family(
        "ministral",
        "Ministral",
        read_ministral,
        DECODER,
        defaults={key: value for key, value in _DEFAULTS.items() if key != "attention_bias"}
        | {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        write=lambda config: write_window(config, 4096),
    ),
    Family(
        "smollm3",
        "SmolLM3",
        read_smollm3,
        DECODER,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "mlp_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        write=write_smollm3,
        harmless=frozenset(("max_window_layers",)),
        gguf=Gguf("smollm3", steps=PAIRS),
    ),
    Family(
        "exaone4",
        "Exaone4",
        read_exaone4,
        _AFTER,
        defaults={key: value for key, value in _DEFAULTS.items() if key != "attention_bias"}
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
        },
        gguf=Gguf("exaone4"),
    ),
    Family(
        "apertus",
        "Apertus",
        read_apertus,
        Tensors(
            (
                *AROUND_LAYERS,
                *under(
                    "layers.{i}.",
                    "layers.{i}.",
                    {
                        "attention_layernorm": "attention_norm",
                        "feedforward_layernorm": "feed_forward_norm",
                    },
                ),
                *ATTENTION,
                *NETWORK,
                *under(
                    "layers.{i}.mlp.act_fn.",
                    "layers.{i}.feed_forward.xielu.",
                    {"alpha_p": "alpha_p", "alpha_n": "alpha_n"},
                ),
            ),
            dropped={r"layers\.\d+\.mlp\.act_fn\.(beta|eps)": "constants of the activation"},
            constants={
                "layers.{i}.mlp.act_fn.beta": 0.5,
                "layers.{i}.mlp.act_fn.eps": -1e-6,
            },
        ),
        defaults=_DEFAULTS | {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "pad_token_id": 3},
    ),
)
