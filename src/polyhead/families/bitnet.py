"""BitNet b1.58 2B4T (Microsoft 2025): relu² networks, and norms before the last projection of
attention and network.

Weights that a file keeps in two bits, or that are rounded while the model runs, are refused with
their ``quantization_config``. In GGUF files the converter has rounded the weights, and the
activation is silu where the file names none.
"""

from __future__ import annotations

from polyhead.config import SubNormAttentionConfig, SubNormFeedForwardConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, theta=5e5)
    sizes = plain.sizes
    if sizes.num_heads * sizes.head_dim != sizes.embed_dim:
        raise keys.refused("head_dim", sizes.head_dim, "hidden_size over num_attention_heads")
    attention = SubNormAttentionConfig(**vars(plain.attention()), out_norm=plain.norm)
    network = SubNormFeedForwardConfig(**vars(plain.network), norm=plain.norm)
    return plain.decoder([plain.layer(attention, network)])


FAMILIES = (
    Family(
        "bitnet",
        "BitNet",
        read,
        DECODER.extended(
            Rule("layers.{i}.self_attn.attn_sub_norm", "layers.{i}.attention.out_norm"),
            Rule("layers.{i}.mlp.ffn_sub_norm", "layers.{i}.feed_forward.norm"),
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 5,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        gguf=Gguf(
            "bitnet",
            settings={"hidden_act": "hidden_act"},
            names={
                "layers.{i}.self_attn.attn_sub_norm": "blk.{i}.attn_sub_norm",
                "layers.{i}.mlp.ffn_sub_norm": "blk.{i}.ffn_sub_norm",
            },
            values=lambda values: {"hidden_act": values.get("hidden_act", "silu")},
        ),
    ),
)
