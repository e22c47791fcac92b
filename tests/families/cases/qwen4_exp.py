from harness import TIED, Case, rope

_PART = {"partial_rotary_factor": 0.5}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGER = {"factor": 8.0, "original_max_position_embeddings": 16, **_PART}

CASES = (
    Case(
        "qwen4_exp_text",
        {
            "vocab_size": 17,
            "eos_token_id": [7, 2],  # a text in which others end
            "num_hidden_layers": 4,
            "intermediate_size": None,
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 6,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "hc_count": 3,
            "hc_lowrank": 10,
            "ple_layer_ids": [3, 1],
            "ple_embed_dim": 24,
            "heads_per_ngram": 3,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 5,
            # With few heads of the indexer many scores are 0, and which are chosen is chance.
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 10,
            "indexer_budget": 12,
            "indexer_compress_ratio": 4,
            "max_position_embeddings": 128,
            "pad_token_id": None,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
            ({}, {"hc_count": 2, "hc_lowrank": 40}, {"output_gate_type": "sigmoid"}),
            (
                {},
                {"ple_layer_ids": [3], "ple_embed_dim": None, "heads_per_ngram": 16},
                {"ple_layer_ids": None, "eos_token_id": None},
                {"ngram_size": 2, "ple_conv_kernel_size": 2, "eos_token_id": 7},
                {"ngram_size": 4, "heads_per_ngram": 1, "seed": 5, "split_ngram_parts": 512},
            ),
            (
                {},
                {"layer_types": None, "full_attention_interval": 2},
                {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
                {"indexer_budget": 3, "indexer_compress_ratio": 3},
                {"indexer_budget": 48},
            ),
            (
                {},
                rope("default", mrope_section=[1, 1, 0], mrope_interleaved=True, **_PART),
                rope("linear", factor=4.0, **_PART),
                rope("llama3", **_LLAMA3, **_LONGER),
                rope("yarn", **_LONGER),
            ),
        ),
        tokens=40,
        # In standard deviations from transformers in float64, states and all, over the options:
        # ours in float64 8e-7, in float32 up to 1.1e-4, transformers' in float32 up to 5.9e-5.
        error=2e-4,
        # A gate is the root of a score, whose slope is great near 0: in float32 transformers'
        # gradients are up to 4.8e-3 from float64, ours 6.9e-3. In float64 both are 1e-5
        # apart, and 3e-4 in one draw, where weights that are off by 1e-9 move ours by 3e-5.
        gradient_error=2e-2,
        float64_gradient_error=5e-4,
    ),
)
