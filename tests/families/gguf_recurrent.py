"""What llama.cpp's converter does to layers that remember a state, written down once more.

From conversion/mamba.py, qwen.py and granite.py of ggml-org/llama.cpp, and compared with what
src/models/*.cpp computes with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from gguf_files import interleaved, paired
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


def alone(config: Any) -> Mapping[str, Any]:
    """Of models whose layers are a mixer alone."""
    return {
        "context_length": 2**20,
        "attention.head_count": 0,
        "attention.key_length": None,
        "attention.value_length": None,
        "feed_forward_length": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }


def mamba_settings(config: Any) -> Mapping[str, Any]:
    """Of Mamba and Falcon-Mamba."""
    return {
        **alone(config),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
    }


def mamba(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Mamba, Falcon-Mamba and Jamba, and what Mamba-2 has of it."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    yield name, tensor.squeeze() if "conv1d.weight" in name else tensor


def mamba2_settings(config: Any) -> Mapping[str, Any]:
    """Of Mamba-2."""
    return {
        **alone(config),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
    }


def mamba2(name: str, tensor: Tensor, config: Any, groups: int | None = None) -> Made:
    """Of Mamba-2 and what has layers of it."""
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        tensor = tensor.reshape(groups or config.n_groups, -1)
    yield from mamba(name, tensor, config)


def of_hybrid(config: Any) -> Mapping[str, Any]:
    """Of Mamba-2 in Falcon-H1, Bamba and Granite."""
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def falcon_h1(name: str, tensor: Tensor, config: Any) -> Made:
    """The factors of Falcon-H1 are multiplied into its weights."""
    attention, ssm = config.attention_in_multiplier, config.ssm_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2]
    tensor = tensor * factors.get(module, 1.0)
    if module == "in_proj":
        states = config.mamba_n_groups * config.mamba_d_state
        inner, heads = config.mamba_d_ssm, config.mamba_n_heads
        rows = tensor.split([inner, inner, states, states, heads])
        parts = zip(rows, config.ssm_multipliers, strict=True)
        tensor = torch.cat([part * ssm * factor for part, factor in parts])
    yield from mamba2(name, tensor, config, config.mamba_n_groups)


def granite_hybrid(config: Any) -> Mapping[str, Any]:
    """Of Granite 4."""
    heads = config.num_key_value_heads
    return {
        **of_hybrid(config),
        **granite_shared(config),
        "context_length": 2**20,
        "attention.head_count_kv": [
            heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "rope.scaling.finetuned": False,
    }


def granite_shared(config: Any) -> Mapping[str, Any]:
    """Of Granite's mixtures with a network beside them."""
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_count": config.num_local_experts,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }


def ling(config: Any) -> Mapping[str, Any]:
    """Of Ling-lite."""
    return {
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "feed_forward_length": 96,  # of dense layers, which there are none of
        "leading_dense_block_count": 0,
        "rope.dimension_count": 8,
    }


def granite(name: str, tensor: Tensor, config: Any) -> Made:
    """Joined rows are cut; a network that stands alone has the names of one."""
    layer = "blk." + [*name.split("."), "", ""][2]
    end = "_shexp" if config.num_local_experts else ""
    if "block_sparse_moe.input_linear" in name:
        for part, rows in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"{layer}.ffn_{part}_exps.weight", rows
    elif "shared_mlp.input_linear" in name:
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{layer}.ffn_{part}{end}.weight", rows
    elif "shared_mlp.output_linear" in name:
        yield f"{layer}.ffn_down{end}.weight", tensor
    else:
        groups = getattr(config, "mamba_n_groups", None)
        for called, each in paired(name, tensor, config):
            yield from mamba2(called, each, config, groups)


def jamba_settings(config: Any) -> Mapping[str, Any]:
    """Of Jamba."""
    heads, period = config.num_key_value_heads, config.attn_layer_period
    return {
        "attention.head_count_kv": [
            heads if i % period == config.attn_layer_offset else 0
            for i in range(config.num_hidden_layers)
        ],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "expert_count": config.num_experts,
    }


def jamba(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Jamba, whose experts get the names of Qwen's."""
    yield from mamba(name.replace("feed_forward.experts", "mlp.experts"), tensor, config)


def nemotron_h_settings(config: Any) -> Mapping[str, Any]:
    """Of Nemotron-H and Nemotron 3."""
    kinds, heads = config.layers_block_type, config.num_key_value_heads
    sparse = "moe" in kinds
    hidden = config.moe_intermediate_size if sparse else config.intermediate_size
    networks = ("mlp", "moe")
    stated = {
        "context_length": 2**20,
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [hidden if kind in networks else 0 for kind in kinds],
        "rope.freq_base": 1e4,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
        "expert_used_count": config.num_experts_per_tok if sparse else None,
    }
    if not sparse:
        return stated
    return {
        **stated,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": 1,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def nemotron_h(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Nemotron-H; of Nemotron 3 too, whose branch of the converter comes to the same."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            tensor = interleaved(tensor, heads)
    yield from mamba2(name, tensor, config)


def kimi_settings(config: Any) -> Mapping[str, Any]:
    """Of Kimi Linear."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": 72,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "rope.freq_base": 1e4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
    }


def kimi(name: str, tensor: Tensor, config: Any) -> Made:
    """Of Kimi Linear, from the names of published files."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace(".dt_bias", ".dt_proj.bias")
    for part in ("gate", "up", "down"):  # of dense layers, which transformers names otherwise
        name = name.replace(f".block_sparse_moe.{part}_proj", f".mlp.{part}_proj")
    if name.endswith("conv1d.weight"):
        tensor = tensor.reshape(1, tensor.shape[0], 1, -1)
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    if "kv_b_proj" not in name:
        yield name, tensor
        return
    rows = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
    keys, values = rows.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.mT
    yield name.replace("kv_b_proj", "v_b_proj"), values
