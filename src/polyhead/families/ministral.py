"""Ministral (2024): Mistral with windows by layer."""

from __future__ import annotations

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, windowed, write_window
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    count = plain.sizes.num_layers
    every_layer = [SLIDING if keys.whole("sliding_window", None) else FULL] * count
    attentions = windowed(keys, plain.attention(), count, every_layer)
    return plain.decoder([plain.layer(each) for each in attentions])


FAMILIES = (
    Family(
        "ministral",
        "Ministral",
        read,
        DECODER,
        defaults={key: value for key, value in PLAIN_DEFAULTS.items() if key != "attention_bias"}
        | {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        write=lambda config: write_window(config, 4096),
    ),
)
