"""Hunyuan (Tencent 2025): Llama whose queries and keys are normalized after rotation."""

from __future__ import annotations

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK, NORMS
from polyhead.families.common.tensors import Tensors, under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, alpha=True)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm, place="after_rope"))
    return plain.decoder([plain.layer(attention)])


FAMILIES = (
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        read,
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
        defaults=PLAIN_DEFAULTS | {"rms_norm_eps": 1e-5, "pad_token_id": 0, "head_dim": None},
        harmless=frozenset(("eod_token_id",)),
        gguf=Gguf("hunyuan-dense"),
    ),
)
