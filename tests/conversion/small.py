"""Tiny random decoders of several families, with every norm and bias away from its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polyhead.families import read_config
from polyhead.models import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
OWN_SIZES = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mpt": {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}


def small(family: str, **changes: Any) -> Transformer:
    """A model of a family, in evaluation mode."""
    values = dict(OWN_SIZES.get(family, SIZES))
    values |= (DEEPSEEK if family.startswith("deepseek") else {}) | changes
    config = read_config({"model_type": family, **values}, Path("config.json"))
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    return model.eval()
