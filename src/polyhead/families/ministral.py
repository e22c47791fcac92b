"""Ministral (2024), Mistral with windows by layer; Ministral 3 (2025), with queries that grow by
position; CWM (Meta's Code World Model, 2025), Llama 3 with windows by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import RopeConfig, TransformerConfig
from polyhead.config.attention import QueryTemperatureConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, windowed, write_window
from polyhead.families.common.reading import FULL, SLIDING, read_network
from polyhead.families.common.rope import states_rope, write_plain_rope, write_scaling
from polyhead.families.common.tables import DECODER

_DEFAULTS = {key: value for key, value in PLAIN_DEFAULTS.items() if key != "attention_bias"}
_NO_BIAS = {"attention_bias": "transformers reads it and does not apply it"}
BETA = "llama_4_scaling_beta"
_ROPE_OF_THIRD = RopeConfig(
    1e6,
    "yarn",
    factor=16.0,
    original_max_positions=16_384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_ROPE_OF_CWM = RopeConfig(
    1e6,
    "llama3",
    factor=16.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
_ENDS_OF_CWM = (128001, 128008, 128009)


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    count = plain.sizes.num_layers
    every_layer = [SLIDING if keys.whole("sliding_window", None) else FULL] * count
    attentions = windowed(keys, plain.attention(), count, every_layer)
    return plain.decoder([plain.layer(each) for each in attentions])


def read_third(keys: Keys) -> TransformerConfig:
    plain = Plain(
        keys,
        states_trained=True,
        read_elsewhere=(BETA, "max_position_embeddings"),
        unstated=_ROPE_OF_THIRD,
    )
    temperature = QueryTemperatureConfig(0.1, 16_384)
    if states_rope(keys):
        temperature = read_temperature(keys)
    window = keys.whole("sliding_window", None)
    return plain.decoder(
        [plain.layer(plain.attention(window=window, query_temperature=temperature))]
    )


def read_temperature(keys: Keys) -> QueryTemperatureConfig:
    """How queries grow, which files say among the rope parameters."""
    values: Mapping[str, Any] = keys.take("rope_parameters", None) or keys.take("rope_scaling")
    inner = Keys(values, f"{keys.where}: rope_parameters")
    return QueryTemperatureConfig(
        inner.number(BETA), inner.size("original_max_position_embeddings")
    )


def write_third(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    rope, temperature = attention.rope, attention.query_temperature
    return {
        "rope_scaling": {
            "rope_type": rope.type,
            **write_scaling(rope),
            BETA: temperature.scale,
            "original_max_position_embeddings": temperature.every,
        }
    }


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Queries grow where the rotary embedding's own context ends, and mscale is all of it."""
    scaling = values.get("rope_scaling", {})
    mscale = values.get(".mscale", 1.0)
    more = {BETA: values[".beta"], "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_scaling": {**scaling, **more}}


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    scale, mscale = attention.query_temperature.scale, attention.rope.mscale_all_dim
    own = {} if mscale is None else {"rope.scaling.yarn_log_multiplier": mscale}
    return {"attention.temperature_scale": scale, **own}


def read_cwm(keys: Keys) -> TransformerConfig:
    network = read_network(keys, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=network, theta=1e6, unstated=_ROPE_OF_CWM)
    count = plain.sizes.num_layers
    default = [SLIDING if i % 4 else FULL for i in range(count)]
    attentions = windowed(keys, plain.attention(), count, default)
    config = plain.decoder([plain.layer(each) for each in attentions])
    return replace(config, eos_token_ids=config.eos_token_ids or _ENDS_OF_CWM)


def write_cwm(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {**write_plain_rope(attention.rope), **write_window(config, 8192)}


FAMILIES = (
    Family(
        "ministral",
        "Ministral",
        read,
        DECODER,
        defaults=_DEFAULTS | {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        write=lambda config: write_window(config, 4096),
        not_supported=_NO_BIAS,
    ),
    Family(
        "ministral3",
        "Ministral3",
        read_third,
        DECODER,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "pad_token_id": 11,
        },
        write=write_third,
        not_supported=_NO_BIAS,
        gguf=Gguf(
            "mistral3",
            settings={
                "attention.temperature_scale": ".beta",
                "rope.scaling.yarn_log_multiplier": ".mscale",
            },
            steps=PAIRS,
            values=_from_gguf,
            settings_of=_settings_of,
            fits=lambda metadata: "mistral3.attention.temperature_scale" in metadata,
        ),
    ),
    Family(
        "cwm",
        "Cwm",
        read_cwm,
        DECODER,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "sliding_window": 8192,
            "bos_token_id": 128000,
            "eos_token_id": None,
        },
        write=write_cwm,
        not_supported=_NO_BIAS,
    ),
)
