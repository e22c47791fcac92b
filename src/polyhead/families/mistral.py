"""Mistral (Jiang et al. 2023): Llama with a window in every layer."""

from __future__ import annotations

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    attention = sizes.attention(
        rope=rope,
        window=keys.whole("sliding_window", None),
        dropout=keys.number("attention_dropout"),
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, read_network(keys), norm)] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


FAMILIES = (
    Family(
        "mistral",
        "Mistral",
        read,
        DECODER,
        defaults={
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        # Files of Mistral itself are called "llama"; these are of models that read images too.
        gguf=Gguf(
            "mistral3",
            steps=PAIRS,
            values=lambda values: {"sliding_window": values.get("sliding_window")},
            fits=lambda metadata: "mistral3.attention.temperature_scale" not in metadata,
            saved=False,
        ),
    ),
)
