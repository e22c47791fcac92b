"""SmolLM3 (2025): Llama whose every fourth layer does not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import FULL, SLIDING, read_layer_types, read_network
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")), theta=2e6)
    count, interval = plain.sizes.num_layers, keys.whole("no_rope_layer_interval")
    if interval < 1:
        raise keys.refused("no_rope_layer_interval", interval, "at least 1 layer")
    rotated = keys.take("no_rope_layers", None)
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    if (
        not isinstance(rotated, list)
        or len(rotated) != count
        or any(i not in (0, 1) for i in rotated)
    ):
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


def write(config: TransformerConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer.attention.rope is not None) for layer in config.layers]}


FAMILIES = (
    Family(
        "smollm3",
        "SmolLM3",
        read,
        DECODER,
        defaults=PLAIN_DEFAULTS
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
        write=write,
        harmless=frozenset(("max_window_layers",)),
        gguf=Gguf("smollm3", steps=PAIRS),
    ),
)
