"""Hunyuan (Tencent 2025): Llama whose queries and keys are normalized after rotation, and its
mixture of experts, Hunyuan-A13B. Hy3 (2026) normalizes before rotation and chooses experts as
DeepSeek-V3 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import FeedForwardConfig, MixtureConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import dense_layers, write_dense_layers
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.steps import Each, RotaryPairs, Step
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, DECODER, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.qwen_moe import EXPERTS, PROJECTIONS


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, alpha=True)
    return plain.decoder([plain.layer(_attention(plain))])


def read_mixture(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, alpha=True)
    count = plain.sizes.num_layers
    visited = keys.take("moe_topk")
    each = visited if isinstance(visited, list) else [visited] * count
    if len(each) != count or any(type(number) is not int for number in each):
        raise keys.refused("moe_topk", visited, f"a number of experts, or {count} of them")
    network, experts = plain.network, keys.whole("num_experts")
    mixtures = [
        MixtureConfig(network, experts, number, shared=network, normalize=True) for number in each
    ]
    attention = _attention(plain)
    return plain.decoder([plain.layer(attention, mixture) for mixture in mixtures])


def read_third(keys: Keys) -> TransformerConfig:
    dense = read_network(keys, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=dense, theta=11_158_840.0)
    width, beside = keys.whole("moe_intermediate_size"), keys.size("num_shared_experts")
    mixture = MixtureConfig(
        replace(dense, hidden_dim=width, bias=False),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(dense, hidden_dim=width * beside),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
        scale=keys.number("router_scaling_factor"),
    )
    keys.expect("first_k_dense_replace", 1)  # in the published file
    kinds = keys.texts("mlp_layer_types", [])
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    return plain.decoder(
        [
            plain.layer(attention, dense if is_dense else mixture)
            for is_dense in dense_layers(keys, plain.sizes.num_layers, kinds)
        ]
    )


def _attention(plain: Plain) -> Any:
    return plain.attention(qk_norm=QKNormConfig(plain.norm, place="after_rope"))


def write_mixture(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    visited = [network.experts_per_token for network in networks]
    return {"moe_topk": visited[0] if len({*visited}) == 1 else visited}


def write_third(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    values = write_dense_layers(config)
    if mixture is not None:
        beside: Any = mixture.shared
        values |= {
            "num_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "moe_intermediate_size": mixture.expert.hidden_dim,
            "num_shared_experts": beside.hidden_dim // mixture.expert.hidden_dim,
            "router_scaling_factor": mixture.scale,
        }
    return values if dense is None else values | {"intermediate_size": dense.hidden_dim}


def _stretched(values: Mapping[str, Any]) -> dict[str, Any]:
    """The base of files whose reader works alpha out, as ``read_rope`` does."""
    alpha, size = values.get(".alpha", 1.0), values["head_dim"]
    return {"rope_theta": values["rope_theta"] * alpha ** (size / (size - 2))}


_NORMS_OF_HEADS = under(
    "layers.{i}.self_attn.",
    "layers.{i}.attention.",
    {"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
)
_NEIGHBOURS: Mapping[str, tuple[Step | Each, ...]] = {
    **PAIRS,
    **{f"layers.{{i}}.self_attn.{name}_layernorm": (RotaryPairs(),) for name in ("query", "key")},
}
_MIXTURE = "layers.{i}.feed_forward."
_DEFAULTS = PLAIN_DEFAULTS | {"rms_norm_eps": 1e-5}

FAMILIES = (
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        read,
        Tensors((*AROUND_LAYERS, *NORMS, *_NORMS_OF_HEADS, *ATTENTION, *NETWORK)),
        defaults=_DEFAULTS | {"pad_token_id": 0, "head_dim": None},
        harmless=frozenset(("eod_token_id",)),
        gguf=Gguf("hunyuan-dense"),
        more_gguf=(
            # HunyuanVL's text, whose four coordinates are equal where there are no pictures.
            Gguf(
                "hunyuan_vl",
                settings={
                    "rope.dimension_sections": ".sections",
                    "rope.scaling.alpha": ".alpha",
                },
                values=_stretched,
                saved=False,
            ),
            # Maincoder, whose models turn neighbours, which the norms behind follow.
            Gguf("maincoder", steps=_NEIGHBOURS, saved=False),
        ),
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        read_mixture,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *_NORMS_OF_HEADS,
                *ATTENTION,
                Rule("layers.{i}.mlp.gate.wg", _MIXTURE + "router"),
                *under(
                    "layers.{i}.mlp.",
                    _MIXTURE,
                    {
                        f"{theirs}.{name}": f"{ours}.{name}"
                        for theirs, ours in (
                            ("experts.{j}", "experts.{j}"),
                            ("shared_mlp", "shared"),
                        )
                        for name in PROJECTIONS
                    },
                ),
            )
        ),
        defaults=_DEFAULTS | {"pad_token_id": 0, "head_dim": None, "num_experts": 1, "moe_topk": 1},
        write=write_mixture,
        harmless=frozenset(("eod_token_id", "router_aux_loss_coef")),
        gguf=Gguf(
            "hunyuan-moe",
            settings={
                "expert_used_count": "moe_topk",
                "expert_feed_forward_length": "intermediate_size",
                "expert_shared_feed_forward_length": "intermediate_size",
                "expert_shared_count": None,
            },
        ),
    ),
    Family(
        "hy_v3",
        "HYV3",
        read_third,
        DECODER.extended(
            Rule("layers.{i}.mlp.router.gate", _MIXTURE + "router"),
            Rule("layers.{i}.mlp.expert_bias", _MIXTURE + "choice_bias"),
            *under(
                "layers.{i}.mlp.shared_mlp.",
                _MIXTURE + "shared.",
                {name: name for name in PROJECTIONS},
            ),
            *EXPERTS[1:],
        ),
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_bias": False,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write_third,
        # In which precision two results are added.
        harmless=frozenset(("enable_moe_fp32_combine", "router_aux_loss_coef")),
    ),
)
