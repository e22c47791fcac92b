"""GLM-4.5 and 4.6 (2025): grouped heads with half of each rotated, DeepSeek-V3's mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import FeedForwardConfig, MixtureConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, write_share
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK, NORMS
from polyhead.families.common.tensors import Tensors
from polyhead.families.deepseek import CHOICE_BIAS, EXPERTS, GGUF_MIXTURE


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, partial_rotary_factor=0.5)
    keys.whole("num_nextn_predict_layers", 0)
    qk_norm = QKNormConfig(plain.norm) if keys.flag("use_qk_norm") else None
    attention = plain.attention(out_bias=False, qk_norm=qk_norm)
    width, shared = keys.whole("moe_intermediate_size"), keys.whole("n_shared_experts")
    activation = plain.network.activation
    mixture = MixtureConfig(
        FeedForwardConfig(width, activation=activation),
        keys.whole("n_routed_experts"),
        keys.whole("num_experts_per_tok"),
        shared=FeedForwardConfig(shared * width, activation=activation),
        scoring="sigmoid",
        choice_bias=True,
        normalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"),
        groups=keys.whole("n_group"),
        groups_per_token=keys.whole("topk_group"),
        group_score="best two",
    )
    first = keys.whole("first_k_dense_replace")
    return plain.decoder(
        [
            plain.layer(attention, plain.network if i < first else mixture)
            for i in range(plain.sizes.num_layers)
        ]
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    sparse = [i for i, each in enumerate(networks) if isinstance(each, MixtureConfig)]
    attention: Any = config.layers[0].attention
    values = {
        "first_k_dense_replace": sparse[0] if sparse else len(networks),
        "use_qk_norm": attention.qk_norm is not None,
        **write_share(config),
    }
    if not sparse:
        return values
    mixture = networks[sparse[0]]
    return values | {
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "n_shared_experts": mixture.shared.hidden_dim // mixture.expert.hidden_dim,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalize,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """Layers of multi-token prediction follow the model's own."""
    first, extra = values["num_hidden_layers"], values.get("num_nextn_predict_layers") or 0
    drafting = "|".join(str(first + i) for i in range(extra))
    reason = "predicts further tokens, for training and drafting"
    return Tensors(
        (*AROUND_LAYERS, *NORMS, *ATTENTION, *NETWORK, *EXPERTS),
        dropped={rf"layers\.({drafting})\..+": reason} if extra else {},
    )


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of multi-token prediction are counted among the others."""
    extra = values.get("num_nextn_predict_layers", 0)
    return {"num_hidden_layers": values["num_hidden_layers"] - extra}


FAMILIES = (
    Family(
        "glm4_moe",
        "Glm4Moe",
        read,
        tensors,
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
        gguf=Gguf(
            "glm4moe",
            settings={**GGUF_MIXTURE, "expert_gating_func": None},
            names=CHOICE_BIAS,
            values=_from_gguf,
        ),
    ),
)
