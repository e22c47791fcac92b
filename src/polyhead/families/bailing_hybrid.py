"""Ling 3.0 (Inclusion AI 2026): Kimi delta attention of bounded decay, and gated latent attention.

Its mixture is DeepSeek-V3's. Published files have names of their own, which transformers writes
too; ``head_dim`` is that of linear layers there, and of the rotated part where transformers wrote
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    GatedLatentAttentionConfig,
    KimiDeltaAttentionConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families import kimi_linear
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import drafting, read_networks
from polyhead.families.common.reading import FULL, LINEAR, read_decoder, read_layer_types
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import joined_convolution
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.deepseek import tensors as deepseeks


def read(keys: Keys) -> TransformerConfig:
    num_layers, num_heads = keys.num_layers("num_hidden_layers"), keys.size("num_attention_heads")
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    positions, rotated = keys.whole("max_position_embeddings"), keys.whole("qk_rope_head_dim")
    rope = read_rope(keys, rotated, positions, theta=6_000_000.0)
    full = GatedLatentAttentionConfig(
        num_heads=num_heads,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=rotated,
        v_head_dim=keys.whole("v_head_dim"),
        bias=keys.flag("attention_bias"),
        rope=rope,
        dropout=keys.number("attention_dropout"),
    )
    keys.expect("num_key_value_heads", num_heads, None)
    keys.expect("qk_head_dim", full.qk_head_dim, None)
    keys.expect("linear_num_heads", num_heads, None)
    size, kernel = keys.size("head_dim"), keys.size("short_conv_kernel_size")
    size = keys.size("linear_head_dim", size)
    keys.expect("linear_conv_kernel_dim", kernel, None)
    bound, bounded = keys.number("kda_lower_bound"), keys.flag("kda_safe_gate")
    if bounded and bound >= 0:
        raise keys.refused("kda_lower_bound", bound, "a number below 0")
    state = KimiDeltaAttentionConfig(
        num_heads,
        num_heads,
        size,
        size,
        kernel,
        norm_eps=norm.eps,
        low_rank=False,
        decay_bound=-bound if bounded else None,
    )
    every = keys.size("layer_group_size")
    default = [LINEAR if (i + 1) % every else FULL for i in range(num_layers)]
    kinds = read_layer_types(keys, num_layers, default, (LINEAR, FULL))
    network = FeedForwardConfig(keys.whole("intermediate_size"), "silu")
    networks = read_networks(keys, "sigmoid", network, num_layers, listed=True)
    layers = [
        LayerConfig(full if kind == FULL else state, each, norm)
        for kind, each in zip(kinds, networks, strict=True)
    ]
    return read_decoder(keys, layers, max_positions=reach(rope, positions), norm=norm)


def write(config: TransformerConfig) -> dict[str, Any]:
    states: list[Any] = [layer.attention for layer in config.layers]
    state = next(each for each in states if each.kind == "kimi_delta")
    written = kimi_linear.write(config)
    del written["q_lora_rank"]
    bound = state.decay_bound
    return {
        **written,
        "short_conv_kernel_size": state.conv_kernel,
        "kda_safe_gate": bound is not None,
        **({} if bound is None else {"kda_lower_bound": -bound}),
    }


_THEIRS, _OURS = "layers.{i}.attention.", "layers.{i}.attention."
_PUBLISHED = (
    Rule("word_embeddings", "embedding.tokens"),
    *under(
        _THEIRS,
        _OURS,
        {
            **{name: name for name in ("k_proj", "v_proj", "kv_b_proj", "A_log", "dt_bias")},
            "dense": "o_proj",
            "kv_a_layernorm": "kv_a_norm",
            "b_proj": "beta_proj",
            "f_proj": "decay_proj",
            "g_proj": "gate_proj",
            "o_norm": "norm",
        },
    ),
    joined_convolution(_THEIRS, _OURS),
    Rule("layers.{i}.mlp.gate.expert_bias", "layers.{i}.feed_forward.choice_bias"),
)
_TRANSFORMERS = (
    *under(
        "layers.{i}.self_attn.",
        _OURS,
        {
            **{name: name for name in ("k_proj", "v_proj")},
            "b_proj": "beta_proj",
            "forget_gate.A_log": "A_log",
            "forget_gate.dt_bias": "dt_bias",
            "forget_gate.f_proj": "decay_proj",
            "g_proj": "gate_proj",
            "o_norm": "norm",
        },
    ),
    Rule("layers.{i}.self_attn.conv1d.weight", _OURS + "conv_weight", Shaped((1,))),
)


def table(values: Mapping[str, Any]) -> Tensors:
    """Published names before transformers' own."""
    plain = deepseeks({**values, "rope_interleave": True})
    paired = [
        rule.with_(_THEIRS + rule.theirs.rpartition(".")[2], *rule.steps)
        for rule in plain.rules
        if rule.theirs.endswith((".self_attn.q_proj", ".kv_a_proj_with_mqa"))
    ]
    return replace(
        plain.extended(*paired, *_PUBLISHED, *_TRANSFORMERS),
        dropped={**plain.dropped, **drafting(values)},
    )


FAMILIES = (
    Family(
        "bailing_hybrid",
        "BailingHybrid",
        read,
        table,
        defaults={
            **{
                key: value
                for key, value in kimi_linear.DEFAULTS.items()
                if not key.startswith(("linear_", "q_lora", "bos_", "layer_types"))
            },
            "vocab_size": 157_184,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "moe_intermediate_size": 768,
            "n_routed_experts": 512,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "num_key_value_heads": 32,
            "eos_token_id": 156_895,
            "pad_token_id": 156_892,
        },
        aliases=kimi_linear.ALIASES,
        write=write,
        harmless=frozenset(
            (
                "num_nextn_predict_layers",
                "num_mtp_layers",
                "mtp_loss_scaling_factor",
                "output_router_logits",
            )
        ),
    ),
)
