"""EXAONE 4 (LG 2025): norms after each part; layers with windows rotate, the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import WINDOWS, Gguf, layer_types
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed
from polyhead.families.common.tables import AFTER


def read(keys: Keys) -> TransformerConfig:
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


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """A file that states no window has none."""
    return {"sliding_window": values.get("sliding_window"), **layer_types(values)}


FAMILIES = (
    Family(
        "exaone4",
        "Exaone4",
        read,
        AFTER,
        defaults={key: value for key, value in PLAIN_DEFAULTS.items() if key != "attention_bias"}
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
        },
        gguf=Gguf("exaone4", WINDOWS, values=_from_gguf),
    ),
)
