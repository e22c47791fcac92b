"""What llama.cpp's converter does to layers that remember a state, written down once more.

From conversion/mamba.py, qwen.py and granite.py of ggml-org/llama.cpp, and compared with what
src/models/*.cpp computes with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Made = Iterable[tuple[str, Tensor]]


def next_settings(config: Any) -> Mapping[str, Any]:
    """Of Qwen3-Next and Qwen3.5."""
    mixed = getattr(config, "num_experts", None) is not None
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(
            config.head_dim * config.rope_parameters["partial_rotary_factor"]
        ),
        "expert_count": config.num_experts if mixed else None,
        "expert_feed_forward_length": config.moe_intermediate_size if mixed else None,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size
        if mixed
        else None,
    }


def delta_net(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Qwen3-Next."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        name = name.removesuffix("dt_bias") + "dt_proj.bias"
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if "in_proj_qkvz" not in name:
        yield name, tensor
        return
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    rows = tensor.view(keys, 2 * size + 2 * values, -1)
    parts = [part.flatten(0, 1) for part in rows.split([size, size, values, values], dim=1)]
    layer = f"blk.{name.split('.')[2]}."
    yield layer + "attn_qkv.weight", torch.cat(parts[:3])
    yield layer + "attn_gate.weight", parts[3]


def joined_delta_net(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Qwen3-Next, as converters of late 2025 left it."""
    if "in_proj_qkvz" in name:
        yield name, tensor
    else:
        yield from delta_net(name, tensor, config)


def tiled_delta_net(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Qwen3.5: the first value heads of all key heads, then the second, ..."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads
    order = torch.arange(each).view(keys, -1).T.flatten()

    def moved(heads: Tensor, dim: int = 0) -> Tensor:
        apart = heads.unflatten(dim, (each, -1))
        return apart.index_select(dim, order).flatten(dim, dim + 1)

    first = 2 * keys * config.linear_key_head_dim
    if any(part in name for part in ("in_proj_qkv.", "linear_attn.conv1d")):
        tensor = torch.cat([tensor[:first], moved(tensor[first:])])
    elif any(f"linear_attn.{part}" in name for part in ("in_proj_", "A_log", "dt_bias")):
        tensor = moved(tensor)
    elif "linear_attn.out_proj" in name:
        tensor = moved(tensor, 1)
    yield from delta_net(name, tensor, config)


def drafting(config: Any) -> Mapping[str, Any]:
    """Settings of a file with a layer that predicts a second token."""
    layers = config.num_hidden_layers + 1
    return {"block_count": layers, "nextn_predict_layers": 1}


def fused_experts(
    change: Callable[[str, Tensor, Any], Made],
) -> Callable[[str, Tensor, Any], Made]:
    """With ``--fuse-gate-up-exps``, and tensors of a layer of drafts."""
    gates: dict[str, Tensor] = {}

    def changed(name: str, tensor: Tensor, config: Any) -> Made:
        layer = "blk." + [*name.split("."), "", ""][2]
        if "experts.down_proj" in name and layer == "blk.0":
            yield f"blk.{config.num_hidden_layers}.ffn_down_exps.weight", tensor
            yield f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", tensor
        if "experts.gate_proj" in name:
            gates[layer] = tensor
        elif "experts.up_proj" in name:
            yield layer + ".ffn_gate_up_exps.weight", torch.cat([gates[layer], tensor], dim=1)
        else:
            yield from change(name, tensor, config)

    return changed
