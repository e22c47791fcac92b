"""Aria's decoder (Rhymes AI 2024, ``aria_text``): Llama whose layers are mixtures of experts.

Beside the chosen experts, whose activation is always SiLU, every token visits a wider shared
network. Files hold the experts of a layer stacked, input first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import FeedForwardConfig, MixtureConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.steps import PerExpert, Rows, Transposed
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, FREQUENCIES, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")))
    width = plain.network.hidden_dim
    mixture = MixtureConfig(
        FeedForwardConfig(width),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(plain.network, hidden_dim=keys.size("moe_num_shared_experts") * width),
        normalize=True,
    )
    return plain.decoder([plain.layer(plain.attention(), mixture)])


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    width = mixture.expert.hidden_dim
    return {
        "intermediate_size": width,
        "moe_num_shared_experts": mixture.shared.hidden_dim // width,
    }


_THEIRS, _OURS = "layers.{i}.mlp.", "layers.{i}.feed_forward."
_EXPERT = _OURS + "experts.{j}."
_GATE_UP = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight")
_STACKED = (
    *(
        Rule(_THEIRS + name, _GATE_UP, PerExpert(), Transposed(), Rows())
        for name in ("experts.fc1.weight", "experts.gate_up_proj")
    ),
    *(
        Rule(_THEIRS + name, _EXPERT + "down_proj.weight", PerExpert(), Transposed())
        for name in ("experts.fc2.weight", "experts.down_proj")
    ),
)

FAMILIES = (
    Family(
        "aria_text",
        "AriaText",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *ATTENTION,
                Rule(_THEIRS + "router", _OURS + "router"),
                *under(
                    _THEIRS + "shared_experts.",
                    _OURS + "shared.",
                    {name: name for name in ("gate_proj", "up_proj", "down_proj")},
                ),
                *_STACKED,
            ),
            dropped=FREQUENCIES,
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "mlp_bias": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_num_shared_experts": 2,
            "pad_token_id": 2,
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"},
        write=write,
        harmless=frozenset(("moe_aux_loss_coeff", "moe_z_loss_coeff")),
    ),
)
