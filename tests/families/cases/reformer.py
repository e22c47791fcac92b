from collections.abc import Mapping
from typing import Any

from harness import Case
from torch import Tensor
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

_hashed = LSHSelfAttention._hash_vectors


def _hashed_in_float32(self: Any, vectors: Tensor, *more: Any, **named: Any) -> Tensor:
    """In float64 torch draws other numbers of a seed, so that it would be another model.

    Where a token sees itself alone in several rounds, as the first of a text does, transformers
    adds up weights exp(−1e5 − lse) whose sum float32 rounds to 1 ± 0.004: there
    float64 decides.
    """
    return _hashed(self, vectors.float(), *more, **named)


LSHSelfAttention._hash_vectors = _hashed_in_float32


def _trained(model: Any, options: Mapping[str, Any]) -> None:
    """transformers' reversible layers have gradients in training alone; nothing is dropped."""
    model.train()


CASES = (
    Case(
        "reformer",
        {
            "is_decoder": True,
            "attn_layers": ["local", "lsh"],
            "attention_head_size": 8,
            "axial_pos_shape": [4, 6],
            "axial_pos_embds_dim": [12, 20],
            "feed_forward_size": 40,
            "intermediate_size": None,
            "num_hidden_layers": None,
            "num_key_value_heads": None,
            "hidden_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 6,
            "num_buckets": 4,
            "hash_seed": 3,
        },
        axes=(
            ({}, {"attn_layers": ["lsh", "lsh"]}, {"attn_layers": ["local"]}),
            ({}, {"num_hashes": 3}, {"num_hashes": 2, "hash_seed": 11}),
            ({}, {"num_buckets": [2, 4]}, {"lsh_attn_chunk_length": 24}),
            ({}, {"lsh_num_chunks_before": 0}, {"lsh_num_chunks_before": 3}),
            ({}, {"local_num_chunks_before": 0}, {"local_num_chunks_before": 2}),
            ({}, {"axial_pos_embds": False}, {"hidden_act": "gelu"}, {"layer_norm_eps": 0.1}),
        ),
        alter=_trained,
    ),
)
