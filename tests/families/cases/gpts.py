from collections.abc import Iterable, Mapping
from typing import Any

from gguf_files import GgufCase, separated
from harness import TIED, Case, rope, ropes
from torch import Tensor

_OWN_NAMES = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_NO_GROUPS = {"num_key_value_heads": None}
_NETWORKS = ({}, {"n_inner": 40}, {"activation_function": "silu"})
_SCALES = ({}, {"scale_attn_weights": False})


def _settings(config: Any) -> Mapping[str, Any]:
    return {
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": 1 if config.model_type == "gpt_bigcode" else None,
    }


def _transposed(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, tensor.T if turned else tensor


def _neox_settings(config: Any) -> Mapping[str, Any]:
    size = config.hidden_size // config.num_attention_heads
    return {
        "rope.dimension_count": int(config.rope_parameters["partial_rotary_factor"] * size),
        "use_parallel_residual": config.use_parallel_residual,
    }


_OF_GPT2 = (TIED, _NETWORKS, _SCALES, ({"scale_attn_by_inverse_layer_idx": True}, {}))

CASES = (
    Case(
        "gpt2",
        _OWN_NAMES,
        axes=_OF_GPT2,
        gguf=GgufCase("gpt2", _settings, _transposed),
    ),
    Case("gpt-sw3", _OWN_NAMES, axes=_OF_GPT2),
    Case(
        "openai-gpt",
        _OWN_NAMES,
        axes=(TIED, ({}, {"afn": "relu"}, {"afn": "silu"}, {"afn": "swish"})),
    ),
    Case(
        "gpt_bigcode",
        _OWN_NAMES,
        axes=(TIED, _NETWORKS, _SCALES, ({}, {"multi_query": False})),
        gguf=GgufCase("starcoder", _settings),
    ),
    Case(
        "gpt_neo",
        _NO_GROUPS
        | {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
        },
        axes=(
            TIED,
            ({}, {"intermediate_size": None}, {"activation_function": "gelu"}),
            ({}, {"attention_types": [[["local"], 2]]}, {"attention_types": [[["global"], 2]]}),
        ),
    ),
    Case("gptj", _OWN_NAMES | {"rotary_dim": 4}, axes=(TIED, _NETWORKS, ({}, {"rotary_dim": 8}))),
    Case(
        "codegen",
        _OWN_NAMES | {"rotary_dim": 4},
        axes=(TIED, _NETWORKS, ({}, {"rotary_dim": 2}, {"n_head": 8, "n_embd": 48})),
    ),
    Case(
        "gpt_neox",
        _NO_GROUPS,
        axes=(
            TIED,
            ({}, {"use_parallel_residual": False}),
            ({}, {"attention_bias": False}, {"hidden_act": "silu"}),
            (*ropes(4, partial_rotary_factor=0.5), rope("default", partial_rotary_factor=1.0)),
        ),
        gguf=GgufCase(
            "gptneox",
            _neox_settings,
            separated("query_key_value"),
            rope("default", partial_rotary_factor=1.0),
        ),
    ),
    Case(
        "gpt_neox_japanese",
        _NO_GROUPS | {"intermediate_size": None, "intermediate_multiple_size": 2},
        axes=(TIED, ({}, rope("default", partial_rotary_factor=0.5)), ({}, {"hidden_act": "silu"})),
    ),
    Case("ctrl", _OWN_NAMES | {"dff": 40}, axes=(TIED, ({}, {"layer_norm_epsilon": 0.01}))),
)
