from gguf_files import GgufCase, paired
from harness import TIED, Case, ropes

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
