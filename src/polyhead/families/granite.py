"""Granite 3 (2024): Llama with four multipliers, and its mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyhead.config import EmbeddingConfig, LayerConfig, MixtureConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS as GGUF_EXPERTS
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import PerExpert, Rows
from polyhead.families.common.tables import (
    AROUND_LAYERS,
    ATTENTION,
    DECODER,
    FREQUENCIES,
    NORMS,
)
from polyhead.families.common.tensors import Rule, Tensors

_MIXTURE = "layers.{i}.feed_forward."
_SPARSE = "layers.{i}.block_sparse_moe."
EXPERTS = (
    Rule(_SPARSE + "router.layer", _MIXTURE + "router"),
    Rule(
        _SPARSE + "input_linear.weight",
        (_MIXTURE + "experts.{j}.gate_proj.weight", _MIXTURE + "experts.{j}.up_proj.weight"),
        PerExpert(),
        Rows(),
    ),
    Rule(_SPARSE + "output_linear.weight", _MIXTURE + "experts.{j}.down_proj.weight", PerExpert()),
)


def read(keys: Keys, *, sparse: bool) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=rope,
        scale=keys.number("attention_multiplier"),
        dropout=keys.number("attention_dropout"),
    )
    network: Any = read_network(keys, bias=not sparse and keys.flag("mlp_bias"))
    if sparse:
        network = MixtureConfig(
            network,
            keys.whole("num_local_experts"),
            keys.whole("num_experts_per_tok"),
            normalize=True,
        )
    layer = LayerConfig(attention, network, norm, residual_scale=keys.number("residual_multiplier"))
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(scale=keys.number("embedding_multiplier")),
        logit_scale=1.0 / keys.positive("logits_scaling"),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    network: Any = config.layers[0].feed_forward
    values = {
        "attention_multiplier": attention.head_dim**-0.5
        if attention.scale is None
        else attention.scale,
        "residual_multiplier": config.layers[0].residual_scale,
        "embedding_multiplier": config.embedding.scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }
    if isinstance(network, MixtureConfig):
        values["num_local_experts"] = network.num_experts
    return values


_DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

FAMILIES = (
    Family(
        "granite",
        "Granite",
        partial(read, sparse=False),
        DECODER,
        defaults=_DEFAULTS | {"mlp_bias": False},
        write=write,
        gguf=Gguf("granite", settings=_SCALES, steps=PAIRS),
    ),
    Family(
        "granitemoe",
        "GraniteMoe",
        partial(read, sparse=True),
        Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *EXPERTS), dropped=FREQUENCIES),
        defaults=_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2},
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
        gguf=Gguf(
            "granitemoe",
            settings=_SCALES | {"expert_count": "num_local_experts"},
            steps=PAIRS,
            rules=GGUF_EXPERTS,
        ),
    ),
)
