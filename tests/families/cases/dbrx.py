from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase
from harness import Case
from torch import Tensor

_ATTENTION = {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0}
_EXPERTS = {
    "hidden_size": 32,
    "ffn_hidden_size": 24,
    "moe_num_experts": 5,
    "moe_top_k": 2,
    "moe_loss_weight": 0.0,
}


def _settings(config: Any) -> dict[str, Any]:
    attention, experts = config.attn_config, config.ffn_config
    return {
        "attention.head_count_kv": attention.kv_n_heads,
        "attention.clamp_kqv": attention.clip_qkv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": attention.rope_theta,
        "feed_forward_length": experts.ffn_hidden_size,
        "expert_count": experts.moe_num_experts,
        "expert_used_count": experts.moe_top_k,
    }


def _cut(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The experts' rows lie one behind the other in Hugging Face's files."""
    if ".experts." not in name:
        yield name, tensor
        return
    rows = tensor.view(config.ffn_config.moe_num_experts, -1, config.d_model)
    yield name + ".weight", rows.mT if name.endswith("w2") else rows


CASES = (
    Case(
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": _ATTENTION,
            "ffn_config": _EXPERTS,
            **dict.fromkeys(
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "max_position_embeddings",
                )
            ),
        },
        axes=(
            ({}, {"attn_config": _ATTENTION | {"clip_qkv": 2.0, "kv_n_heads": 1}}),
            ({}, {"ffn_config": _EXPERTS | {"moe_normalize_expert_weights": None}}),
        ),
        gguf=GgufCase("dbrx", _settings, _cut, written=False),
    ),
)
