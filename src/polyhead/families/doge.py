"""Doge (SmallDoge 2025): a dynamic mask of values, and residual paths with learned weights."""

from __future__ import annotations

from typing import Any

from polyhead.config import DynamicMaskConfig, QKNormConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")))
    attention = plain.attention(
        kind=DynamicMaskConfig,
        qk_norm=QKNormConfig(plain.norm),
        window=keys.whole("sliding_window", None),
        top_k=keys.whole("keep_window_size"),
    )
    dropout = keys.number("hidden_dropout", 0.0)
    return plain.decoder([plain.layer(attention, residual_weights=True, dropout=dropout)])


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    if any(each.kind != "dynamic_mask" for each in attentions):
        raise ConfigError("this family needs a dynamic mask in every layer")
    return {
        "hidden_dropout": config.layers[0].dropout,
        "keep_window_size": attentions[0].top_k,
    }


FAMILIES = (
    Family(
        "doge",
        "Doge",
        read,
        DECODER.extended(
            *under(
                "layers.{i}.",
                "layers.{i}.",
                {
                    "self_attn.A": "attention.A",
                    "self_attn.dt_proj": "attention.dt_proj",
                    "input_residual": "attention_residual",
                    "post_attention_residual": "feed_forward_residual",
                },
            )
        ),
        defaults={
            **PLAIN_DEFAULTS,
            "bos_token_id": None,
            "eos_token_id": None,
            "hidden_dropout": 0.0,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "keep_window_size": 2048,
            "sliding_window": None,
        },
        write=write,
        not_supported={
            "is_moe": "its router reshapes the logits of all tokens of a call into two halves, so "
            "experts of a token depend on the others, later ones too",
        },
        # Of experts that there are not.
        harmless=frozenset(
            (
                "num_experts",
                "num_experts_per_tok",
                "norm_topk_prob",
                "output_router_logits",
                "router_aux_loss_coef",
            )
        ),
    ),
)
