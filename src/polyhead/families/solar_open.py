"""Solar Open (Upstage 2025): Llama's attention, DeepSeek-V3's mixture in every layer."""

from __future__ import annotations

from typing import Any

from polyhead.config import FeedForwardConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import EXPERTS, read_mixture, write_mixture
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_activation
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    expert = FeedForwardConfig(keys.whole("moe_intermediate_size"), read_activation(keys))
    plain = Plain(keys, network=expert, theta=1e6)
    for key, assumed in (
        ("scoring_func", "sigmoid"),
        ("first_k_dense_replace", 0),
        ("use_qk_norm", False),
    ):
        keys.expect(key, assumed)
    mixture = read_mixture(keys, "sigmoid", expert)
    return plain.decoder([plain.layer(plain.attention(out_bias=False), mixture)])


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    return write_mixture(mixture)


FAMILIES = (
    Family(
        "solar_open",
        "SolarOpen",
        read,
        DECODER.extended(*EXPERTS),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write,
        # There are no dense networks.
        harmless=frozenset(("intermediate_size", "router_aux_loss_coef")),
    ),
)
