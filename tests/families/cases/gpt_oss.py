from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case, rope
from torch import Tensor

from cases.phi3 import with_factors

_YARN = rope(
    "yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip


def _settings(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }


def _cut(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Experts lie as [X, in, out] with gate and up in turns in Hugging Face's files."""
    if name.endswith("sinks"):
        name += ".weight"
    if name.endswith("_bias"):
        name = name.replace("_bias", ".bias")
    elif name.endswith(("gate_up_proj", "down_proj")):
        name, tensor = name + ".weight", tensor.mT
    if "gate_up_proj" in name:
        yield name.replace("gate_up_proj", "gate_proj"), tensor[:, ::2]
        yield name.replace("gate_up_proj", "up_proj"), tensor[:, 1::2]
    else:
        yield name, tensor


def _phi(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "attention.sliding_window": config.sliding_window or 0,
    }


_LONG = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[2.0, 2.2, 2.4, 2.6],
    original_max_position_embeddings=32,
    short_mscale=1.2,
    long_mscale=1.2,
)


def _long(config: Any) -> dict[str, Any]:
    rotary = config.rope_parameters
    return {
        **_phi(config),
        "rope.scaling.original_context_length": rotary["original_max_position_embeddings"],
        "rope.scaling.attn_factor": rotary["short_mscale"],
    }


CASES = (
    Case(
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "sliding_window": 7,
            **_YARN,
        },
        axes=(
            TIED,
            ({}, {"swiglu_limit": 0.3}, {"attention_bias": False}),
            ({}, rope("default"), {"num_key_value_heads": 4}),
            ({}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ),
        gguf=GgufCase("gpt-oss", _settings, _cut),
    ),
    Case(
        "phimoe",
        {"num_local_experts": 5},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"sliding_window": 7}),
            ({}, {"lm_head_bias": True}, {"router_jitter_noise": 0.3}),
            # Beyond the trained length transformers keeps the short factors, and the model's own
            # code does not.
            (_LONG, {}),
        ),
        gguf=GgufCase("phimoe", _phi, options={"lm_head_bias": True, "attention_bias": True}),
        more_gguf=(GgufCase("phimoe", _long, with_factors, _LONG),),
    ),
)
