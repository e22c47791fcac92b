from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase, paired
from harness import TIED, Case, ropes
from torch import Tensor
from torch.nn.functional import pad


def _internlm2(config: Any) -> dict[str, Any]:
    """Heads have the size that follows from the others."""
    return {"attention.key_length": None, "attention.value_length": None}


def _usual_base(config: Any) -> dict[str, Any]:
    """Their converters write no rotary base."""
    return {**_internlm2(config), "rope.dimension_count": 8, "rope.freq_base": None}


def _exaone(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
    }


def _sizes_of_deci(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": [2, 4], "feed_forward_length": [40, 48]}


def _repeated(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """In the second layer every kv head twice, and more of the hidden size, which gives 0."""
    second = ".layers.1." in name
    if second and ("gate_proj" in name or "up_proj" in name):
        tensor = pad(tensor, (0, 0, 0, 8))
    if second and "down_proj" in name:
        tensor = pad(tensor, (0, 8))
    for called, made in paired(name, tensor, config):
        if second and ("k_proj" in name or "v_proj" in name):
            made = made.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
        yield called, made


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
            GgufCase("deci", _sizes_of_deci, _repeated),
            GgufCase("xverse", _usual_base, paired, {"head_dim": None}),
            GgufCase("pangu-embedded", options={"attention_bias": True}),
            GgufCase("baichuan", _usual_base, paired, {"head_dim": None, "num_hidden_layers": 32}),
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
