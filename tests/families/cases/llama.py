from typing import Any

from gguf_files import GgufCase, paired
from harness import TIED, Case, ropes


def _internlm2(config: Any) -> dict[str, Any]:
    """Heads have the size that follows from the others."""
    return {"attention.key_length": None, "attention.value_length": None}


def _exaone(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
    }


CASES = (
    Case(
        "llama",
        {"head_dim": 12},
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu_new"}),
            ropes(12),
        ),
        gguf=GgufCase("llama", change=paired, options={"attention_bias": True}),
        more_gguf=(
            GgufCase("internlm2", _internlm2, paired, {"head_dim": None}),
            GgufCase("exaone", _exaone, options={"head_dim": 8}),
        ),
    ),
    Case(
        "mistral",
        axes=(
            TIED,
            ({"sliding_window": 7}, {"sliding_window": None}, {"head_dim": 12}),
        ),
        gguf=GgufCase("llama", change=paired, options={"sliding_window": None}),
        more_gguf=(GgufCase("mistral3", change=paired, options={"sliding_window": None}),),
    ),
    Case(
        "internlm3",
        {"head_dim": 12},
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 4}),
            ({}, {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "bias": True}),
            ropes(12),
        ),
    ),
    Case(
        "iquestcoder",
        {"head_dim": 12},
        axes=(TIED, ({}, {"attention_bias": True}, {"mlp_bias": True}), ropes(12)),
    ),
)
