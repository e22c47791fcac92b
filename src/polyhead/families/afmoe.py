"""AFMoE (Arcee's Trinity, 2025): gated attention, norms around each part, a mixture of experts.

Layers with windows rotate, each fourth sees everything without rotation. After a few dense layers
every token visits shared experts beside those that DeepSeek-V3's gate chooses.
"""

from __future__ import annotations

import math
from typing import Any

from polyhead.config import (
    GatedAttentionConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    EXPERTS,
    GGUF_MIXTURE,
    read_networks,
    write_networks,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed, write_window
from polyhead.families.common.tables import SANDWICH
from polyhead.families.common.tensors import under

_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "first_k_dense_replace": "num_dense_layers",
    "norm_topk_prob": "route_norm",
    "scoring_func": "score_func",
}


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    # What the published files say and transformers assumes.
    keys.expect("scoring_func", "sigmoid")
    keys.expect("norm_topk_prob", True)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        keys.expect(key, 1)
    count, interval = plain.sizes.num_layers, keys.size("global_attn_every_n_layers")
    attention = plain.attention(
        kind=GatedAttentionConfig, gate_bias=False, qk_norm=QKNormConfig(plain.norm)
    )
    attentions = windowed(keys, attention, count, every(count, interval), rope=None)
    networks = read_networks(keys, "sigmoid", plain.network, count)
    return plain.decoder(
        [
            plain.layer(each, network, norm_placement="sandwich")
            for each, network in zip(attentions, networks, strict=True)
        ],
        embedding_scale=math.sqrt(plain.sizes.embed_dim) if keys.flag("mup_enabled") else 1.0,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        **{_NAMES.get(key, key): value for key, value in write_networks(config).items()},
        **write_window(config, 1024),
        "mup_enabled": config.embedding.scale != 1.0,
    }


_LAYER = "layers.{i}."
_TENSORS = SANDWICH.extended(
    *under(
        _LAYER,
        _LAYER,
        {
            "pre_mlp_layernorm": "feed_forward_norm",
            "post_mlp_layernorm": "feed_forward_out_norm",
            "self_attn.gate_proj": "attention.gate_proj",
            "mlp.router.gate": "feed_forward.router",
            "mlp.expert_bias": "feed_forward.choice_bias",
        },
    ),
    *EXPERTS,
)

FAMILIES = (
    Family(
        "afmoe",
        "Afmoe",
        read,
        _TENSORS,
        defaults=PLAIN_DEFAULTS
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
            "mup_enabled": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        aliases=_NAMES,
        write=write,
        harmless=frozenset(("load_balance_coeff", "use_grouped_mm")),
        gguf=Gguf(
            "afmoe",
            settings=GGUF_MIXTURE,
            constants=SIGMOID,
            names={_LAYER + "mlp.expert_bias": "blk.{i}.exp_probs_b.bias"},
            values=lambda values: {"mup_enabled": True},  # llama.cpp computes nothing else
        ),
    ),
)
