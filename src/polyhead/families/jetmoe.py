"""JetMoE (Shen et al. 2024): a mixture of experts in attention as well as in the network."""

from __future__ import annotations

from typing import Any

from polyhead.config import (
    ExpertHeadsAttentionConfig,
    InitialConfig,
    LayerConfig,
    MixtureConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import PerExpert, Rows
from polyhead.families.common.tables import AROUND_LAYERS, FREQUENCIES, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    kv_heads, head_dim = keys.size("num_key_value_heads"), keys.size("head_dim")
    experts, visited = keys.size("num_local_experts"), keys.size("num_experts_per_tok")
    keys.expect("num_attention_heads", kv_heads * visited)
    if visited > experts:
        raise keys.refused("num_experts_per_tok", visited, f"1 to num_local_experts={experts}")
    norm, positions = read_rms_norm(keys), keys.whole("max_position_embeddings")
    rope = read_rope(keys, head_dim, positions)
    attention = ExpertHeadsAttentionConfig(
        kv_heads * visited,
        kv_heads,
        head_dim,
        out_bias=True,
        rope=rope,
        dropout=keys.number("attention_dropout"),
        num_experts=experts,
    )
    network = MixtureConfig(read_network(keys), experts, visited, normalize=True, output_bias=True)
    return read_decoder(
        keys,
        [LayerConfig(attention, network, norm)] * keys.num_layers("num_hidden_layers"),
        max_positions=reach(rope, positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: Any = config.layers[0].attention
    return {
        "num_local_experts": heads.num_experts,
        "num_experts_per_tok": heads.experts_per_token,
    }


_MIXTURE = "layers.{i}.feed_forward."
_EXPERT = _MIXTURE + "experts.{j}."
_HEADS = "layers.{i}.attention."

FAMILIES = (
    Family(
        "jetmoe",
        "JetMoe",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                Rule(
                    "layers.{i}.self_attention.kv_proj",
                    (_HEADS + "k_proj", _HEADS + "v_proj"),
                    Rows(),
                ),
                *under(
                    "layers.{i}.self_attention.experts.",
                    _HEADS,
                    {
                        "router.layer": "router",
                        "input_linear.weight": "q_experts",
                        "output_linear.weight": "o_experts",
                        "bias": "o_bias",
                    },
                ),
                Rule("layers.{i}.mlp.router.layer", _MIXTURE + "router"),
                Rule("layers.{i}.mlp.bias", _MIXTURE + "output_bias"),
                Rule(
                    "layers.{i}.mlp.input_linear.weight",
                    (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
                    PerExpert(),
                    Rows(),
                ),
                Rule(
                    "layers.{i}.mlp.output_linear.weight",
                    _EXPERT + "down_proj.weight",
                    PerExpert(),
                ),
            ),
            dropped=FREQUENCIES,
        ),
        initial=InitialConfig(scale=0.01),
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        write=write,
        aliases={"head_dim": "kv_channels", "hidden_act": "activation_function"},
        harmless=frozenset(("output_router_logits", "aux_loss_coef")),
    ),
)
