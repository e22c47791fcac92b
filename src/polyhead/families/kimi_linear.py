"""Kimi Linear (2025): layers of Kimi delta attention, and of latent attention without positions.

Its mixture is DeepSeek-V3's under other names. The published file says the sizes of the linear
layers in an object of their own, which numbers layers from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.config import (
    FeedForwardConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, Gguf, Joined
from polyhead.families.common.gguf_states import KV_HEADS, Flat, Rates, attends
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import GGUF_MIXTURE, read_networks, write_mixture
from polyhead.families.common.reading import FULL, LINEAR, read_decoder, read_layer_types
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import AROUND_LAYERS, NORMS, joined_convolution
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.deepseek import write_attention
from polyhead.families.deepseek_gguf import JOINED_LATENTS

_EVERY = 4
ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def read(keys: Keys) -> TransformerConfig:
    num_layers, num_heads = keys.num_layers("num_hidden_layers"), keys.size("num_attention_heads")
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    keys.expect("mla_use_nope", True)
    keys.expect("moe_router_activation_func", "sigmoid")
    keys.expect("use_grouped_topk", True)
    rotated, nope = keys.whole("qk_rope_head_dim"), keys.whole("qk_nope_head_dim")
    full = LatentAttentionConfig(
        num_heads=num_heads,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank", None),
        bias=keys.flag("attention_bias"),
        norm=NormConfig("rmsnorm", eps=1e-6),
        rope=None,
        dropout=keys.number("attention_dropout"),
    )
    keys.take("head_dim", None)  # published files and transformers' differ, and neither is read
    keys.expect("qk_head_dim", full.qk_head_dim, None)
    keys.take("num_key_value_heads", None)
    stated, default = _stated(keys, num_layers)
    heads = stated.size("num_heads", keys.size("linear_num_heads"))
    size = stated.size("head_dim", keys.size("linear_head_dim"))
    kernel = stated.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim"))
    state = KimiDeltaAttentionConfig(heads, heads, size, size, kernel, norm_eps=norm.eps)
    stated.finish()
    kinds = read_layer_types(keys, num_layers, default, (LINEAR, FULL))
    dense = FeedForwardConfig(keys.whole("intermediate_size"), "silu")
    networks = read_networks(keys, "sigmoid", dense, num_layers, listed=True)
    layers = [
        LayerConfig(full if kind == FULL else state, network, norm)
        for kind, network in zip(kinds, networks, strict=True)
    ]
    reached = keys.whole("max_position_embeddings")
    return read_decoder(keys, layers, max_positions=reached, norm=norm)


def _stated(keys: Keys, num_layers: int) -> tuple[Keys, list[str]]:
    """The published file's object about linear layers, and the kinds of layers if no list says."""
    values = keys.take("linear_attn_config", None) or {}
    if not isinstance(values, Mapping):
        raise keys.refused("linear_attn_config", values, "an object")
    stated = Keys(dict(values), f"{keys.where}: {keys.named('linear_attn_config')}")
    full, linear = stated.wholes("full_attn_layers"), stated.wholes("kda_layers")
    if not full and not linear:
        return stated, [FULL if i and i % _EVERY == 0 else LINEAR for i in range(num_layers)]
    if sorted(full + linear) != [*range(1, num_layers + 1)]:
        raise stated.refused("kda_layers", linear, f"with full_attn_layers 1 to {num_layers}")
    return stated, [FULL if i + 1 in full else LINEAR for i in range(num_layers)]


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    full = next((each for each in found if "latent" in each.kind), None)
    state = next((each for each in found if each.kind == "kimi_delta"), None)
    if full is None or state is None:
        raise ConfigError("this family needs layers of latent and of Kimi delta attention")
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    kinds = ["sparse" if each is mixture else "dense" for each in networks]
    values = {
        **write_attention(full),
        "linear_num_heads": state.num_heads,
        "linear_head_dim": state.head_k_dim,
        "linear_conv_kernel_dim": state.conv_kernel,
        "layer_types": [FULL if each == full else LINEAR for each in found],
        "mlp_layer_types": kinds,
    }
    if dense is not None:
        values["intermediate_size"] = dense.hidden_dim
    if mixture is not None:
        values |= {ALIASES.get(key, key): each for key, each in write_mixture(mixture).items()}
    return values


_ATTENTION = "layers.{i}.self_attn.", "layers.{i}.attention."
_NETWORK = "layers.{i}.feed_forward."
_SAME = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _delta(beside: str) -> tuple[Rule, ...]:
    """Parts of the decays, which transformers keeps in a module of their own."""
    theirs, ours = _ATTENTION
    names = {"f_a_proj": "decay_a_proj", "f_b_proj": "decay_b_proj", "dt_bias": "dt_bias"}
    return (
        *under(theirs + beside, ours, names),
        Rule(theirs + beside + "A_log", ours + "A_log", Shaped((0, 1, 3))),
    )


def _network(theirs: str) -> tuple[Rule, ...]:
    """A network under one of the two names that files have."""
    return (
        *under(theirs, _NETWORK, _SAME),
        *under(theirs + "experts.{j}.", _NETWORK + "experts.{j}.", _EXPERT),
        *under(theirs + "shared_experts.", _NETWORK + "shared.", _SAME),
        Rule(theirs + "gate", _NETWORK + "router"),
        Rule(theirs + "gate.e_score_correction_bias", _NETWORK + "choice_bias"),
    )


TENSORS = Tensors(
    (
        *AROUND_LAYERS,
        *NORMS,
        *under(
            *_ATTENTION,
            {
                **{name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj")},
                **{name: name for name in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")},
                "q_a_layernorm": "q_a_norm",
                "kv_a_layernorm": "kv_a_norm",
                "b_proj": "beta_proj",
                "g_a_proj": "gate_a_proj",
                "g_b_proj": "gate_b_proj",
                "o_norm": "norm",
            },
        ),
        *_delta(""),
        *_delta("forget_gate."),
        joined_convolution(*_ATTENTION),
        Rule(_ATTENTION[0] + "conv1d.weight", _ATTENTION[1] + "conv_weight", Shaped((1,))),
        *_network("layers.{i}.block_sparse_moe."),
        *_network("layers.{i}.mlp."),
    ),
)

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 163_840,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1_048_576,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "pad_token_id": 163_839,
}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated = values.get("qk_rope_head_dim", 0)
    return {
        "layer_types": [FULL if each else LINEAR for each in attends(values)],
        "linear_num_heads": values["num_attention_heads"],
        "qk_nope_head_dim": values.get(".key_length_mla", 0) - rotated,
    }


def _channels(parts: Sequence[Tensor]) -> Tensor:
    """Of queries, keys and values, ``[1, R, 1, N]`` each, or ``[R, 1, N]`` after quantization."""
    return torch.cat([part.flatten(0, -2) for part in parts])


_CONVOLUTION = Joined(
    "blk.{i}.ssm_conv1d.weight",
    ("blk.{i}.ssm_conv1d_q.weight", "blk.{i}.ssm_conv1d_k.weight", "blk.{i}.ssm_conv1d_v.weight"),
    _channels,
)
_SPARSE = "layers.{i}.block_sparse_moe."
_GGUF = Gguf(
    "kimi-linear",
    settings={
        **GGUF_MIXTURE,
        **KV_HEADS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length": ".key_length",  # of heads as a cache holds them
        "attention.value_length": ".value_length",
        "attention.key_length_mla": ".key_length_mla",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "kda.head_dim": "linear_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
    },
    constants=SIGMOID,
    names={
        _ATTENTION[0] + "dt_bias": "blk.{i}.ssm_dt.bias",
        _SPARSE + "gate.e_score_correction_bias": "blk.{i}.exp_probs_b.bias",
    },
    steps={_ATTENTION[0] + "A_log": (Flat((0, 1, 3)), Rates())},
    rules=(Rule("blk.{i}.ssm_conv1d.weight", _ATTENTION[1] + "conv_weight"),),
    joined=(*JOINED_LATENTS, _CONVOLUTION),
    values=_from_gguf,
    saved=False,  # the converter cuts the projection of latents
)

FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinear",
        read,
        TENSORS,
        defaults=DEFAULTS,
        aliases=ALIASES,
        write=write,
        gguf=_GGUF,
        harmless=frozenset(("num_nextn_predict_layers", "rope_theta", "rope_scaling")),
    ),
)
