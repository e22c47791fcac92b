"""Phi-3.5-MoE (2024): LayerNorms and experts that a sparsemixer chooses."""

from __future__ import annotations

from typing import Any

from polyhead.config import LayerConfig, MixtureConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_decoder,
    read_layer_norm,
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope, write_scaling
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NORMS
from polyhead.families.common.tensors import Tensors
from polyhead.families.mixtral import BLOCK_SPARSE


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_layer_norm(keys, "rms_norm_eps")
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=1e6, mscales=True)
    if rope.type not in ("default", "longrope"):
        raise keys.refused("rope_parameters", rope.type, "'default' or 'longrope'")
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=rope,
        window=keys.whole("sliding_window", None),
        dropout=keys.number("attention_dropout"),
    )
    mixture = MixtureConfig(
        read_network(keys),
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        scoring="sparsemixer",
        jitter=keys.number("router_jitter_noise"),
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, mixture, norm)] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        head_bias=keys.flag("lm_head_bias"),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    rope = config.layers[0].attention.rope
    scaled: dict[str, Any] = {}
    if rope is not None and rope.type == "longrope":
        fields = write_scaling(rope)
        factor = fields.pop("attention_factor")
        fields |= {"rope_type": rope.type, "short_mscale": factor, "long_mscale": factor}
        scaled = {"rope_scaling": fields}
    return {
        **scaled,
        "num_local_experts": mixture.num_experts,
        "router_jitter_noise": mixture.jitter,
        "lm_head_bias": config.head_bias,
    }


FAMILIES = (
    Family(
        "phimoe",
        "Phimoe",
        read,
        Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *BLOCK_SPARSE)),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "lm_head_bias": False,
            "router_jitter_noise": 0.01,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef", "input_jitter_noise")),
        gguf=Gguf(
            "phimoe",
            settings={"expert_count": "num_local_experts"},
            rules=EXPERTS,
            # 0 stands for no window
            values=lambda values: {"sliding_window": values.get("sliding_window") or None},
        ),
    ),
)
