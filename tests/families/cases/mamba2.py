from typing import Any

from gguf_files import GgufCase
from gguf_recurrent import (
    falcon_h1,
    granite,
    granite_hybrid,
    granite_shared,
    jamba,
    jamba_settings,
    ling,
    mamba,
    mamba2,
    mamba2_settings,
    mamba_settings,
    nemotron_h,
    nemotron_h_settings,
    of_hybrid,
)
from harness import TIED, Case, rope

_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 128,
}
_OPTIONS = (
    {},
    {"mamba_conv_bias": False, "mamba_proj_bias": True},
    {"mamba_n_groups": 1, "mamba_d_conv": 2},
    {"time_step_limit": [0.5, 1.5]},
)

_NO_ATTENTION = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
)
HYBRID, LINEAR = "hybrid", "linear_attention"
_BLOCKS = ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"]

_FIRST: dict[str, Any] = {**_NO_ATTENTION, "state_size": 8, "time_step_rank": 5}
_FIRST_AXES = (
    TIED,
    ({}, {"use_bias": True}, {"use_conv_bias": False}, {"layer_norm_epsilon": 0.01}),
    ({}, {"time_step_rank": "auto"}, {"conv_kernel": 2}, {"expand": 3}, {"state_size": 16}),
    ({}, {"residual_in_fp32": False}),
)
_FACTORS = {
    "ssm_multipliers": [0.35, 0.25, 0.7, 1.5, 0.9],
    "mlp_multipliers": [0.88, 1.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.9375,
    "key_multiplier": 0.390625,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.6,
}
_NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
_MAMBA_FILE = GgufCase("mamba", mamba_settings, mamba)

CASES = (
    Case(
        "jamba",
        {
            "num_hidden_layers": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
        },
        axes=(
            TIED,
            ({}, {"mamba_proj_bias": True}, {"mamba_conv_bias": False}, {"rms_norm_eps": 0.01}),
            ({}, {"mamba_dt_rank": "auto"}, {"mamba_d_conv": 2}, {"mamba_expand": 3}),
            (
                {},
                {"num_experts": 1},
                {"expert_layer_period": 1, "expert_layer_offset": 0},
                {"expert_layer_period": 9, "expert_layer_offset": 8},
            ),
            ({}, {"attn_layer_period": 2}, {"attn_layer_offset": 0}),
        ),
        tokens=80,
        # Half a unit in float32's last place of each weight moves the gradients of our model in
        # float64 by up to 2.3e-4, in one of its draws.
        gradient_error=3e-4,
        gguf=GgufCase("jamba", jamba_settings, jamba),
        more_gguf=(GgufCase("jamba", jamba_settings, jamba, options={"num_experts": 1}),),
    ),
    Case("mamba", _FIRST, axes=_FIRST_AXES, tokens=80, gguf=_MAMBA_FILE),
    Case(
        "falcon_mamba",
        _FIRST,
        axes=(*_FIRST_AXES, ({}, {"mixer_rms_eps": 0.01})),
        tokens=80,
        gguf=_MAMBA_FILE,
    ),
    Case(
        "mamba2",
        {
            **_NO_ATTENTION,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 32,
        },
        axes=(
            TIED,
            ({}, {"use_bias": True}, {"use_conv_bias": False}, {"layer_norm_epsilon": 0.01}),
            ({}, {"n_groups": 1, "conv_kernel": 2}, {"expand": 3, "num_heads": 12}),
            ({}, {"time_step_limit": [0.5, 1.5]}),
            ({}, {"residual_in_fp32": False}),
        ),
        tokens=80,
        gguf=GgufCase("mamba2", mamba2_settings, mamba2),
    ),
    Case(
        "nemotron_h",
        {
            "num_hidden_layers": None,
            "layers_block_type": _BLOCKS,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 32,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "time_step_min": 0.4,
        },
        axes=(
            ({}, {"use_bias": True}, {"use_conv_bias": False}, {"mlp_bias": True}),
            ({}, {"n_groups": 1, "conv_kernel": 2}, {"time_step_min": 0.001}),
            (
                {},
                {"layers_block_type": ["full_attention", "linear_attention", "linear_attention"]},
                {"layers_block_type": None},
                {"layers_block_type": None, "hybrid_override_pattern": "MM-M*EM"},
            ),
            ({}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}),
            ({}, {"routed_scaling_factor": 1.7, "mlp_hidden_act": "silu"}),
        ),
        tokens=80,
        gguf=GgufCase(
            "nemotron_h_moe",
            nemotron_h_settings,
            nemotron_h,
            options={
                "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                "time_step_min": 0.001,
                "routed_scaling_factor": 1.7,
            },
        ),
        more_gguf=(
            GgufCase(
                "nemotron_h",
                nemotron_h_settings,
                nemotron_h,
                options={
                    "layers_block_type": ["linear_attention", "mlp", *_BLOCKS[2:4]],
                    "time_step_min": 0.001,
                    "mlp_bias": True,
                },
            ),
        ),
    ),
    Case(
        "falcon_h1",
        {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}),
            (
                *_OPTIONS,
                {"projectors_bias": True},
                {"mamba_d_ssm": 96, "mamba_d_head": 12},
                {"mamba_d_ssm": None},
            ),
            (
                {},
                {"mamba_rms_norm": True},
                {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
            ),
            (
                {},
                {
                    "ssm_multipliers": [0.35, 0.25, 0.7, 1.5, 0.9],
                    "mlp_multipliers": [0.88, 1.3],
                    "ssm_in_multiplier": 1.25,
                    "ssm_out_multiplier": 0.7,
                },
                {
                    "attention_in_multiplier": 0.9,
                    "attention_out_multiplier": 1.9375,
                    "key_multiplier": 0.390625,
                },
                {"key_multiplier": 1.7, "embedding_multiplier": 5.6, "lm_head_multiplier": 0.6},
            ),
            ({}, rope("linear", factor=4.0)),
        ),
        tokens=80,
        gguf=GgufCase("falcon-h1", of_hybrid, falcon_h1),
        more_gguf=(GgufCase("falcon-h1", of_hybrid, falcon_h1, options=_FACTORS | _NORMED),),
    ),
    Case(
        "bamba",
        {**_MAMBA, "attn_layer_indices": [1]},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            _OPTIONS,
            ({}, {"attn_layer_indices": [0, 2]}, rope("linear", factor=4.0)),
        ),
        tokens=80,
    ),
    Case(
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_local_experts": 0}),
            _OPTIONS,
            ({}, {"position_embedding_type": "rope", **rope("linear", factor=4.0)}),
            ({}, {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0}),
        ),
        tokens=80,
        gguf=GgufCase("granitehybrid", granite_hybrid, granite),
        more_gguf=(
            GgufCase(
                "granitehybrid",
                granite_hybrid,
                granite,
                options={"num_local_experts": 0, "shared_intermediate_size": 40},
            ),
        ),
    ),
    Case(
        "granitemoeshared",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"shared_intermediate_size": 0})),
        gguf=GgufCase("granitemoe", granite_shared, granite),
        more_gguf=(
            GgufCase(
                "bailingmoe",
                ling,
                granite,
                {
                    "attention_multiplier": 8**-0.5,
                    "shared_intermediate_size": 80,
                    "tie_word_embeddings": False,
                },
            ),
        ),
    ),
    Case(
        "zamba",
        {
            "num_hidden_layers": 5,
            "layers_block_type": [LINEAR, HYBRID, LINEAR, HYBRID, HYBRID],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "max_position_embeddings": 128,
        },
        axes=(
            ({}, {"n_mamba_heads": 1}, {"n_mamba_heads": 2, "mamba_expand": 3}),
            ({}, {"mamba_proj_bias": True}, {"mamba_conv_bias": False}, {"mamba_d_conv": 2}),
            ({}, {"hidden_act": "silu"}, {"num_key_value_heads": 4}, {"rms_norm_eps": 0.01}),
            (
                {},
                {"layers_block_type": None, "attn_layer_period": 2, "attn_layer_offset": 1},
                {"mamba_dt_rank": "auto"},
            ),
        ),
        tokens=80,
    ),
    Case(
        "zamba2",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [LINEAR, HYBRID, HYBRID, LINEAR, HYBRID, HYBRID],
            "num_key_value_heads": None,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "chunk_size": 32,
            "num_mem_blocks": 2,
            "adapter_rank": 5,
            "time_step_min": 0.4,
            "max_position_embeddings": 128,
        },
        axes=(
            ({}, {"num_mem_blocks": 1}, {"num_mem_blocks": 3}, {"num_mem_blocks": 5}),
            ({}, {"add_bias_linear": True}, {"hidden_act": "silu"}, {"num_key_value_heads": 2}),
            ({}, {"mamba_ngroups": 1, "mamba_d_conv": 2}, {"mamba_expand": 3, "n_mamba_heads": 4}),
            (
                {},
                {"use_shared_attention_adapter": True, "num_key_value_heads": 4},
                {"use_mem_rope": True, **rope("linear", factor=4.0)},
                {"use_mem_rope": True, "use_long_context": True},
            ),
            ({}, {"intermediate_size": None, "time_step_min": 0.001}),
        ),
        tokens=80,
    ),
)
