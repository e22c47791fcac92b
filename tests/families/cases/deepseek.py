from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, choice_bias, routed
from harness import TIED, Case, rope
from torch import Tensor

_SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.707,
)


def _settings(config: Any) -> dict[str, Any]:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        **routed(config),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "expert_gating_func": 2,
    }


def _older(config: Any) -> dict[str, Any]:
    """Before heads were folded into their latents, and before gates were named."""
    return {
        **_settings(config),
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,
        "expert_group_count": None,
        "expert_group_used_count": None,
    }


def _folded(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    if "kv_b_proj" not in name:
        yield from choice_bias(name, tensor, config)
        return
    rows = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
    keys, values = rows.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.mT
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _indexed(config: Any) -> dict[str, Any]:
    """Of GLM-5: the first files list no indexers, and all layers have their own."""
    of_yarn = dict.fromkeys(key for key in _settings(config) if key.startswith("rope.scaling."))
    own = [kind == "full" for kind in config.indexer_types]
    return {
        **_settings(config),
        **of_yarn,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": None if all(own) else own,
    }


_GROWING = [
    {"rope_parameters": {**each["rope_parameters"], "llama_4_scaling_beta": 0.5}}
    for each in (
        _YARN,
        rope("linear", factor=4.0, original_max_position_embeddings=10),
        rope("yarn", factor=4.0, original_max_position_embeddings=10, attention_factor=0.9),
    )
]
_SIX = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7}
_BOTH = {"rope_parameters": {**_YARN["rope_parameters"], "mscale": 0.707}}

CASES = (
    Case(
        "deepseek_v2",
        _SIZES,
        axes=(
            TIED,
            ({}, {"q_lora_rank": None}, {"attention_bias": True, "mlp_bias": True}),
            ({}, {"topk_method": "group_limited_greedy"}, {"first_k_dense_replace": 2}),
            ({}, _YARN),
        ),
        gguf=GgufCase("deepseek2", _older, options={"q_lora_rank": None, **_BOTH}, written=False),
    ),
    Case(
        "deepseek_v3",
        _SIZES,
        axes=(
            TIED,
            ({}, {"q_lora_rank": None, "attention_bias": True}, {"rope_interleave": False}),
            ({}, {"first_k_dense_replace": 0, "norm_topk_prob": False}),
            ({}, _YARN),
        ),
        gguf=GgufCase("deepseek2", _settings, _folded, _BOTH, written=False),
    ),
    Case(
        "mistral4",
        {**_SIZES, **_GROWING[0]},
        auto="Mistral4ForCausalLM",
        axes=(
            ({}, {"rope_parameters": None}, *_GROWING[1:]),
            TIED,
            ({}, {"q_lora_rank": None}, {"attention_bias": True}, {"n_group": 1, "topk_group": 1}),
            ({}, {"first_k_dense_replace": 0}, {"norm_topk_prob": False}),
            ({}, {"routed_scaling_factor": 1.7}, {"n_shared_experts": 1}),
            ({}, {"rope_interleave": False}),
        ),
    ),
    Case(
        "deepseek_v32",
        # With few heads of the indexer many scores are 0, and which of them are chosen is chance.
        {**_SIZES, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 9},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"index_topk": 64}),
            ({}, {"first_k_dense_replace": 2}, {"mlp_layer_types": ["sparse", "dense"]}),
            ({}, _YARN),
        ),
    ),
    Case(
        "glm_moe_dsa",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 9,
            "indexer_types": ["full", "shared", "full"],
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"index_topk": 64}),
            ({}, {"indexer_types": ["full", "shared", "shared"]}, {"indexer_types": None}),
            ({}, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, _YARN),
        ),
        gguf=GgufCase("glm-dsa", _indexed, _folded, _SIX, written=False),
        more_gguf=(GgufCase("glm-dsa", _indexed, _folded, _SIX | {"indexer_types": ["full"] * 3}),),
    ),
    Case(
        "hy_v4",
        {
            **{key: _SIZES[key] for key in _SIZES if key != "first_k_dense_replace"},
            "num_hidden_layers": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 9,
            "swiglu_limit": 0.5,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"index_topk": 64}),
            ({}, {"indexer_types": ["full", "shared", "shared"]}, {"hc_mult": 2}),
            ({}, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, {"hc_magnitude": 1.5}),
            ({}, {"norm_topk_prob": False}, _YARN),
        ),
    ),
    Case(
        "glm4_moe_lite",
        _SIZES,
        axes=(
            TIED,
            ({}, {"q_lora_rank": None, "attention_bias": True}, {"rope_interleave": False}),
            ({}, {"mlp_layer_types": ["sparse", "dense"]}, {"norm_topk_prob": False}),
        ),
    ),
    Case(
        "axk1",
        {key: value for key, value in _SIZES.items() if key != "first_k_dense_replace"},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"rope_interleave": False}),
            ({}, {"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": ["sparse"] * 2}),
            ({}, {"norm_topk_prob": False}, {"hidden_act": "gelu"}),
            ({}, _YARN),
        ),
    ),
    Case(
        "axk2",
        {
            **{key: _SIZES[key] for key in _SIZES if "group" not in key},
            "n_shared_experts": 1,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 9,
            "gated_norm_rank": 5,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"index_topk": 64}),
            ({}, {"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": ["sparse"] * 2}),
            (
                {},
                {"norm_topk_prob": False},
                {"n_group": 4, "topk_group": 2},
                {"gated_norm_rank": 9},
            ),
            ({}, _YARN),
        ),
    ),
    Case(
        "youtu",
        # transformers clears the row of a padding token whenever it loads.
        {key: value for key, value in _SIZES.items() if "lora" in key or "head" in key}
        | {"pad_token_id": None},
        axes=(TIED, ({}, {"q_lora_rank": None}, {"attention_bias": True}), ({}, _YARN)),
    ),
)
