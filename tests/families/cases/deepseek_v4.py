from typing import Any

import torch
from harness import TIED, Case

_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
_RATES = {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10_000.0, "partial_rotary_factor": 1 / 3,
    }
}  # fmt: skip


def _tables(model: Any, options: Any) -> None:
    """Experts of each token, which transformers leaves at 0."""
    for name, tensor in model.named_buffers():
        if name.endswith("tid2eid"):
            generator = torch.Generator().manual_seed(3)
            order = torch.rand(len(tensor), 6, generator=generator).argsort(dim=1)
            tensor.copy_(order[:, : tensor.shape[1]])


CASES = [
    Case(
        "deepseek_v4",
        {
            "intermediate_size": None,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "partial_rotary_factor": 1 / 3,
            "q_lora_rank": 20,
            "moe_intermediate_size": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": _KINDS,
            "compress_rates": _RATES,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "o_groups": 2,
            "o_lora_rank": 10,
            # With few heads of the indexer many scores are 0, and which are chosen is chance.
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 3,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
        },
        axes=(
            TIED,
            ({}, _YARN, {"compress_rope_theta": 500.0, "rope_theta": 300.0}),
            ({}, {"scoring_func": "sigmoid"}, {"mlp_bias": True}),
            (
                {},
                {
                    "layer_types": _KINDS[:2] * 2,
                    "num_hidden_layers": 4,
                    "mlp_layer_types": ["moe", "hash_moe"] * 2,
                },
                {"index_topk": 64},
            ),
            ({}, {"layer_types": None, "mlp_layer_types": None, "hc_mult": 2}),
        ),
        alter=_tables,
    ),
]
