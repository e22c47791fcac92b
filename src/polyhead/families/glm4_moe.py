"""GLM-4.5 and 4.6 (2025) and dots.llm1 (rednote 2025): grouped heads, DeepSeek-V3's mixture.

GLM rotates half of each head and may normalize queries and keys; dots always normalizes them, and
its late layers may have windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    CHOICE_BIAS,
    EXPERTS,
    GGUF_MIXTURE,
    drafting,
    read_networks,
    without_drafts,
    write_networks,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, windowed, write_share
from polyhead.families.common.predictors import BEHIND_LAYERS
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys, **rotary: Any) -> TransformerConfig:
    plain = Plain(keys, partial_rotary_factor=0.5, **rotary)
    keys.whole("num_nextn_predict_layers", 0)
    qk_norm = QKNormConfig(plain.norm) if keys.flag("use_qk_norm") else None
    attention = plain.attention(out_bias=False, qk_norm=qk_norm)
    networks = read_networks(keys, "sigmoid", plain.network, plain.sizes.num_layers)
    return plain.decoder([plain.layer(attention, network) for network in networks])


def read_dots(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    keys.expect("scoring_func", "noaux_tc", "sigmoid")
    count, window = plain.sizes.num_layers, keys.whole("sliding_window", None)
    first = keys.whole("max_window_layers")
    default = [SLIDING if window is not None and i >= first else FULL for i in range(count)]
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    attentions = windowed(keys, attention, count, default)
    networks = read_networks(keys, "sigmoid", plain.network, count)
    return plain.decoder([*map(plain.layer, attentions, networks)])


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        "use_qk_norm": attention.qk_norm is not None,
        **write_share(config),
        **write_networks(config),
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    return Tensors(
        (*AROUND_LAYERS, *NORMS, *ATTENTION, *NETWORK, *EXPERTS), dropped=drafting(values)
    )


_QKV = tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
_DEFAULTS = PLAIN_DEFAULTS | {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}

FAMILIES = (
    Family(
        "glm4_moe",
        "Glm4Moe",
        read,
        tensors,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
        predictor=BEHIND_LAYERS,
        gguf=Gguf(
            "glm4moe",
            settings=GGUF_MIXTURE,
            constants=SIGMOID,
            names=CHOICE_BIAS,
            values=without_drafts,
        ),
        more_gguf=(
            # Ling 2.0 computes the same, from one matrix of queries, keys and values.
            Gguf(
                "bailingmoe2",
                settings={**GGUF_MIXTURE, "expert_shared_feed_forward_length": None},
                constants=SIGMOID,
                names=CHOICE_BIAS,
                rules=(Rule("blk.{i}.attn_qkv", _QKV, QKVRows()),),
                values=without_drafts,
                saved=False,
            ),
        ),
    ),
    Family(
        "dots1",
        "Dots1",
        read_dots,
        Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *NETWORK, *EXPERTS)),
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write_networks,
        harmless=frozenset(("use_sliding_window",)),  # transformers asks sliding_window alone
        gguf=Gguf(
            "dots1",
            settings=GGUF_MIXTURE,
            constants=SIGMOID,
            names=CHOICE_BIAS,
            values=lambda values: {"sliding_window": None},
        ),
    ),
)
