from collections.abc import Iterable
from typing import Any

from gguf_files import GgufCase
from harness import TIED, Case
from torch import Tensor


def _settings(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _cut(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Experts lie as [X, in, out] in Hugging Face's files, gate and up beside each other."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.mT.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", tensor.mT
    else:
        yield name, tensor


CASES = (
    Case(
        "llama4_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "intermediate_size_mlp": 28,
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 5,
            "attn_scale": 0.4,
        },
        axes=(
            TIED,
            ({}, {"moe_layers": [1]}, {"interleave_moe_layer_step": 2}),
            ({}, {"use_qk_norm": False}, {"attn_temperature_tuning": False}),
            ({}, {"attention_bias": True}, {"num_experts_per_tok": 2}),
        ),
        gguf=GgufCase(
            "llama4",
            _settings,
            _cut,
            # What no file says: the published models have these.
            {
                "no_rope_layers": None,
                "num_hidden_layers": 4,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 8192,
                "floor_scale": 8192,
                "attn_scale": 0.1,
            },
            written=False,
        ),
        more_gguf=(
            GgufCase(
                "llama4",
                lambda config: {**_settings(config), "attention.sliding_window": 0},
                _cut,
                {"no_rope_layers": [1] * 3, "layer_types": ["full_attention"] * 3},
            ),
        ),
    ),
)
