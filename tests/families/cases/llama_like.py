from collections.abc import Iterable, Mapping
from typing import Any

from gguf_files import GgufCase, paired, plus_one
from harness import TIED, Case, rope, ropes
from torch import Tensor

_BIAS = ({}, {"attention_bias": True}, {"mlp_bias": True})
_KINDS = ["sliding_attention", "full_attention"]


def _half(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": 4, "attention.layer_norm_epsilon": config.norm_eps}


_GROWING = [
    {
        "rope_parameters": {
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 10,
            **each["rope_parameters"],
        }
    }
    for each in (rope("default"), *ropes(12)[1:])
]


_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 10,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
}


def _growing(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def windows(config: Any) -> dict[str, Any]:
    """Which layers have one, as a list."""
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window_pattern": kinds}


_TIED = {"tie_word_embeddings": True}


def _unscaled(config: Any) -> dict[str, Any]:
    return {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}


def _first_names(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The names that the converter knows. It rounds weights too; here they are as rounded ones."""
    name = name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
    yield name, tensor


def _of_images(config: Any) -> dict[str, Any]:
    return {"rope.dimension_sections": [2, 2, 2, 0]}


def _halves(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The rows of a model that turns the halves of heads, as PaddleOCR-VL's text model does."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        pairs = tensor.reshape(-1, config.head_dim // 2, 2, tensor.shape[-1])
        tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _activated(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The numbers of xIELU are no tensors in the file."""
    return [] if ".act_fn." in name else [(name, tensor)]


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {
        f"xielu.{each}": [
            float(t) for name, t in tensors.items() if name.endswith(f"act_fn.{each}")
        ]
        for each in names
    }


CASES = (
    Case("diffllama", axes=(TIED, ({}, {"attention_bias": True}, {"head_dim": 12}), ropes(8)[:3])),
    Case(
        "arcee",
        axes=(TIED, _BIAS, ({}, {"hidden_act": "gelu"}), ropes(8)),
        gguf=GgufCase("arcee", change=paired),
    ),
    Case(
        "jais2",
        {"head_dim": 12},
        axes=(
            TIED,
            ({}, {"attention_bias": False}, {"mlp_bias": False}),
            ({}, {"hidden_act": "gelu"}, {"num_key_value_heads": 4}, {"layer_norm_eps": 0.1}),
            ropes(12),
        ),
        gguf=GgufCase("jais2", lambda config: {"rope.dimension_count": config.head_dim}),
    ),
    Case(
        "bitnet",
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_key_value_heads": 4}),
            ({}, {"hidden_act": "silu"}, {"rms_norm_eps": 0.1}),
            ropes(8),
        ),
        gguf=GgufCase("bitnet", _unscaled, _first_names, {"hidden_act": "silu"} | _TIED),
    ),
    Case(
        "nanochat",
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_key_value_heads": 4}, {"rms_norm_eps": 0.1}),
            ({}, {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": None}),
            ({}, {"hidden_act": "gelu"}),
            ropes(8),
        ),
    ),
    Case(
        "seed_oss",
        {"head_dim": 12},
        axes=(TIED, _BIAS, ({}, {"attention_out_bias": True}), ropes(12)),
        gguf=GgufCase("seed_oss"),
    ),
    Case("helium", {"head_dim": 8}, axes=(TIED, _BIAS, ropes(8))),
    Case(
        "nemotron",
        {"head_dim": 8},
        axes=(TIED, _BIAS, ({}, rope("default", partial_rotary_factor=1.0))),
        gguf=GgufCase("nemotron", _half, plus_one),
    ),
    Case(
        "ernie4_5",
        {"head_dim": 12},
        axes=(TIED, ({}, {"use_bias": True}), ropes(12)),
        gguf=GgufCase("ernie4_5"),
        more_gguf=(GgufCase("paddleocr", _of_images, _halves),),
    ),
    Case(
        "ministral",
        {"head_dim": 12, "sliding_window": 7},
        axes=(TIED, ({}, {"layer_types": _KINDS}, {"num_key_value_heads": 4})),
    ),
    Case(
        "ministral3",
        {"head_dim": 12},
        axes=(
            TIED,
            ({}, {"sliding_window": 7}, {"num_key_value_heads": 4}),
            ({}, *_GROWING),
        ),
        gguf=GgufCase("mistral3", _growing, paired, _YARN),
    ),
    Case(
        "cwm",
        {"head_dim": 12, "sliding_window": 7, "num_hidden_layers": 3},
        axes=(
            TIED,
            ({}, {"layer_types": [*_KINDS, "full_attention"]}, {"mlp_bias": True}),
            (*ropes(12), rope("default")),
        ),
    ),
    Case(
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        axes=(
            TIED,
            _BIAS,
            ({}, {"no_rope_layers": None, "no_rope_layer_interval": 2}),
            ({}, {"use_sliding_window": True, "sliding_window": 7}),
        ),
        gguf=GgufCase(
            "smollm3", change=paired, options={"no_rope_layers": None, "num_hidden_layers": 4}
        ),
    ),
    Case(
        "exaone4",
        {"sliding_window": 7},
        axes=(TIED, ({}, {"layer_types": _KINDS}), ropes(8)),
        gguf=GgufCase("exaone4", options={"num_hidden_layers": 4}),
        more_gguf=(
            GgufCase("exaone4", windows, options={"layer_types": _KINDS}),
            GgufCase(
                "exaone4", options={"sliding_window": None, "layer_types": ["full_attention"] * 2}
            ),
        ),
    ),
    Case(
        "apertus",
        axes=(TIED, ({}, {"attention_bias": True}), ropes(8)[1:]),
        gguf=GgufCase("apertus", change=_activated, options=rope("default"), stated=_numbers),
    ),
)
